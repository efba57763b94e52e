"""Errors that name the field at fault and what would mend it."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import Any


class FieldError(ValueError):
    """Bad input: `field` is the name the caller used, `remedy` what would be accepted."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Made in one process, raised in another: `args` are the message, not what made it."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RefusedError(FieldError):
    """A well-formed request that this engine cannot ever run (too long for its context or pool)."""


def short(value: object) -> str:
    """As an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word; empty where none that is known is close."""
    import difflib

    close = difflib.get_close_matches(word[:60], list(known), n=1)  # to compare takes its square
    return f"; did you mean {close[0]}?" if close else ""
