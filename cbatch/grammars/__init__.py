"""Grammars that outputs follow, compiled where that can stop nobody."""

from cbatch.grammars.compiling import MAX_GRAMMAR_CHARS, Compiled, Grammars, not_served
from cbatch.grammars.guard import GrammarGuard, GrammarsBusyError, TriedGrammar
from cbatch.grammars.schemas import FIELD

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
