"""Grammars of structured outputs. A grammar that compiles slowly or crashes delays no request."""

from cbatch.grammars.compiling import MAX_GRAMMAR_CHARS, Compiled, Grammars, grammars_unsupported
from cbatch.grammars.schemas import FIELD
from cbatch.grammars.validator import GrammarsBusyError, GrammarValidator, ValidatedGrammar

__all__ = [
    "FIELD",
    "MAX_GRAMMAR_CHARS",
    "Compiled",
    "GrammarValidator",
    "Grammars",
    "GrammarsBusyError",
    "ValidatedGrammar",
    "grammars_unsupported",
]
