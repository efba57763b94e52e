"""Grammars that outputs follow, compiled where that can stop nobody."""

from cbatch.grammars.compiling import FIELD, MAX_GRAMMAR_CHARS, Compiled, Grammars, not_served
from cbatch.grammars.guard import GrammarGuard, GrammarsBusyError, TriedGrammar

__all__ = [
    "FIELD",
    "MAX_GRAMMAR_CHARS",
    "Compiled",
    "GrammarGuard",
    "Grammars",
    "GrammarsBusyError",
    "TriedGrammar",
    "not_served",
]
