"""Arrival processes: endless, ascending times in seconds from a generator that is passed in.

Renewal processes draw independent gaps with a given rate and coefficient of variation (CV). The
on/off process is a Poisson process that pauses; the diurnal one follows a sine, by thinning (Lewis
and Shedler 1979). Times are made in chunks of `CHUNK` gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from cbatch.core.request.errors import FieldError

CHUNK = 4096
MAX_PARAMETER = 1e9  # of rates, seconds and others; the minimum is 1 / MAX_PARAMETER
_MAX_PHASE_REQUESTS = 1e7  # arrivals, on average


def constant(rate_per_s: float) -> Iterator[float]:
    """Yield times that are 1 / `rate_per_s` apart, from 0."""
    require_positive("rate_per_s", rate_per_s)
    count = 0
    while True:
        yield count / rate_per_s
        count += 1


def poisson(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield times with exponential gaps."""
    return gamma(rate_per_s, 1.0, rng)


def gamma(rate_per_s: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield times with gamma gaps. A CV above 1 gives bursts, below 1 regular arrivals."""
    require_positive("cv", cv)
    shape = 1 / cv**2
    return _renewal(rate_per_s, lambda: rng.gamma(shape, 1 / shape, CHUNK))


def weibull(rate_per_s: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield times with Weibull gaps. Above a CV of 1 the tail is longer than gamma's."""
    shape = weibull_shape(cv)
    mean = math.gamma(1 + 1 / shape)
    return _renewal(rate_per_s, lambda: rng.weibull(shape, CHUNK) / mean)


def on_off(
    rate_per_s: float, on_s: float, off_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """Yield Poisson arrivals in phases of mean length `on_s`, separated by pauses of mean length
    `off_s`, both exponential; `rate_per_s` is the mean over both. The first phase begins at 0."""
    for field, value in (("rate_per_s", rate_per_s), ("on_s", on_s), ("off_s", off_s)):
        require_positive(field, value)
    busy_rate_per_s = rate_per_s * (on_s + off_s) / on_s
    if busy_rate_per_s * on_s > _MAX_PHASE_REQUESTS:
        raise FieldError("on_s", "makes more than 1e7 requests in a phase", "give shorter phases")
    start_s = 0.0
    while True:
        length_s = rng.exponential(on_s)
        # Given their number, the points of a Poisson process are independent and uniform.
        count = rng.poisson(busy_rate_per_s * length_s)
        yield from (start_s + np.sort(rng.random(count)) * length_s).tolist()
        start_s += length_s + rng.exponential(off_s)


def diurnal(
    rate_per_s: float, swing: float, period_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """Yield times at the rate `rate_per_s` (1 + swing sin(2 pi t / period)); swing is in [0, 1]."""
    require_positive("rate_per_s", rate_per_s)
    require_positive("period_s", period_s)
    if not 0 <= swing <= 1:
        raise FieldError("swing", f"{swing} is not allowed", "use a number in [0, 1]")
    peak = 1 + swing
    start_s = 0.0
    while True:
        times_s = start_s + np.cumsum(rng.exponential(1 / (rate_per_s * peak), CHUNK))
        rates = 1 + swing * np.sin(2 * math.pi * times_s / period_s)
        yield from times_s[rng.random(CHUNK) * peak < rates].tolist()
        start_s = float(times_s[-1])


def weibull_shape(cv: float) -> float:
    """Return the shape k with CV^2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 - 1, by bisection (the CV
    falls as k rises)."""
    require_positive("cv", cv)
    low, high = 0.05, 100.0
    if not weibull_cv(high) < cv < weibull_cv(low):
        raise FieldError("cv", f"{cv} is not allowed", "use a number from 0.013 to 1e5")
    for _ in range(80):
        middle = math.sqrt(low * high)
        if weibull_cv(middle) > cv:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def weibull_cv(shape: float) -> float:
    return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))


def _renewal(rate_per_s: float, unit_gaps: Callable[[], np.ndarray]) -> Iterator[float]:
    """Yield times with the gaps of `unit_gaps()`, whose mean is 1, at this rate."""
    require_positive("rate_per_s", rate_per_s)
    last_s = 0.0
    while True:
        times_s = last_s + np.cumsum(unit_gaps() / rate_per_s)
        yield from times_s.tolist()
        last_s = float(times_s[-1])


def require_positive(field: str, value: float) -> None:
    """Raise `FieldError` unless `value` is in [1 / EXTREME, EXTREME], which avoids overflow."""
    if not 1 / MAX_PARAMETER <= value <= MAX_PARAMETER:
        raise FieldError(field, f"{value} is not allowed", "give a number from 1e-9 to 1e9")
