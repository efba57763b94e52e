"""Distributions of prompt and output lengths: functions from (generator, count) to tokens >= 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cbatch.core.request.errors import FieldError

MAX_TOKENS = 2**24  # limit of a prompt or an output; no model has a longer context
Lengths = Callable[[np.random.Generator, int], np.ndarray]  # -> int64 [count]


def fixed(tokens: int) -> Lengths:
    _check("tokens", tokens)
    return lambda rng, count: np.full(count, tokens, dtype=np.int64)


def uniform(low: int, high: int) -> Lengths:
    """Uniform lengths from `low` to `high`, both included."""
    _check_range(low, high)
    return lambda rng, count: rng.integers(low, high, count, endpoint=True)


def lognormal(mean: float, cv: float, *, high: int | None = None) -> Lengths:
    """Log-normal lengths with `mean` and coefficient of variation `cv`, rounded. `high` is their
    upper limit, which lowers the mean."""
    _check("mean", mean)
    if not 0 <= cv <= 1e9:
        raise FieldError("cv", f"{cv} is not allowed", "give 0 to 1e9")
    variance = math.log1p(cv**2)  # of the logarithm

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        values = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
        lengths: np.ndarray = np.clip(np.rint(values), 1, high).astype(np.int64)
        return lengths

    return draw


def zipf(exponent: float, low: int, high: int) -> Lengths:
    """Lengths l from `low` to `high` with probability proportional to l ** -exponent."""
    _check_range(low, high)
    if not 0 <= exponent < math.inf:
        raise FieldError("exponent", f"{exponent} is not allowed", "give 0 or more")
    lengths = np.arange(low, high + 1)
    below = np.cumsum(lengths.astype(np.float64) ** -exponent)

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        drawn: np.ndarray = lengths[np.searchsorted(below, rng.random(count) * below[-1], "right")]
        return drawn

    return draw


def empirical(tokens: Sequence[int] | np.ndarray) -> Lengths:
    """Lengths drawn from the entries of `tokens` with equal probability."""
    values = np.asarray(tokens, dtype=np.int64)
    if not len(values) or values.min() < 1:
        raise FieldError("tokens", "are empty, or contain a 0", "give lengths of 1 token or more")
    return lambda rng, count: rng.choice(values, count)


def _check(field: str, value: float) -> None:
    if not 1 <= value <= MAX_TOKENS:
        raise FieldError(field, f"{value} is not allowed", f"give 1 to {MAX_TOKENS}")


def _check_range(low: int, high: int) -> None:
    _check("low", low)
    _check("high", high)
    if high < low:
        raise FieldError("high", f"{high} is below low, {low}", "give a larger number")
