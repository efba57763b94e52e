"""The range of numbers that options take."""

from __future__ import annotations

import math

MAX_INT = 2**64 - 1  # the largest seed
MAX_FLOAT = 1e9  # in seconds, below the limit of a thread's waits


def number_problem(value: float) -> str | None:
    """Return what to give instead of a number that no option takes, such as NaN, infinity and
    1e300. Return None for other numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    limit = MAX_FLOAT if isinstance(value, float) else MAX_INT
    return None if abs(value) <= limit else f"give at most {int(limit):,}"
