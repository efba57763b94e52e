"""Errors that name the field at fault and what would mend it."""

from __future__ import annotations

import copyreg
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
