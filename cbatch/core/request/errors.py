"""Errors that name the offending field and say how to correct it."""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """Bad input. A command prints the message, without a traceback, and fails."""


class FieldError(InputError):
    """Bad input in a field: `field` is the name that the caller used, `remedy` says what is
    accepted."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts for pickle, which sends errors between processes. It must not call
        `__init__`, because `self.args` has the message in place of the three arguments."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RefusedError(FieldError):
    """A well-formed request that this engine can never run (too long for its context or pool)."""


def too_long(field: str, length: int | str, max_tokens: int, limit: str = "") -> RefusedError:
    """Return the error for a prompt that does not fit in `max_tokens` with one token of output.
    `limit` names another limit than the context. Agents know these words of OpenAI's servers."""
    context = f"This model's maximum context length is {max_tokens} tokens{limit}"
    problem = f"{context}. However, your prompt resulted in {length} tokens"
    return RefusedError(field, problem, "reduce its length, and leave one token for the output")


def short(value: object) -> str:
    """Return the `repr` of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the suggestion that ends a message about an unknown word, or "" if no known word is
    similar."""
    # The word is cut because the comparison takes quadratic time.
    close = difflib.get_close_matches(word[:60], list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
