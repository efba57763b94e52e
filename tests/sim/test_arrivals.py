"""Rates, CVs and laws of the arrival processes, with a broken variant of each that is caught.

Unless said otherwise a check compares a statistic of n = 40,000 arrivals with its expectation and
fails beyond 5 standard errors: a right process fails once in 1.7 million seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cbatch.core.errors import FieldError
from sim import arrivals

COUNT = 40_000
RATE = 6.45
Process = Callable[[np.random.Generator], Iterator[float]]


def times_of(process: Process, seed: int = 3) -> np.ndarray:
    found = np.asarray(list(itertools.islice(process(np.random.default_rng(seed)), COUNT)))
    assert (np.diff(found) >= 0).all() and found[0] >= 0
    return found


def check_rate_and_cv(process: Process, cv: float, skew: float, kurtosis: float) -> None:
    """Renewal processes; the standard error of a CV is by the delta method from the third and
    fourth standardised moments of a gap."""
    gaps = np.diff(times_of(process))
    mean = gaps.mean()
    assert abs(mean * RATE - 1) < 5 * cv / math.sqrt(COUNT), "rate"
    error = cv * math.sqrt(((kurtosis - 1) / 4 + cv**2 - cv * skew) / COUNT)
    assert abs(gaps.std() / mean - cv) < 5 * error, "CV"


def check_law(process: Process, below: Callable[[np.ndarray], np.ndarray]) -> None:
    """Kolmogorov-Smirnov: sqrt(n) D > 2.7 happens once in a million."""
    gaps = np.sort(np.diff(times_of(process)))
    ranks = np.arange(len(gaps) + 1) / len(gaps)
    expected = below(gaps)
    distance = max((ranks[1:] - expected).max(), (expected - ranks[:-1]).max())
    assert distance * math.sqrt(len(gaps)) < 2.7


def weibull_moments(shape: float) -> tuple[float, float]:
    """Skewness and kurtosis."""
    g = [math.gamma(1 + i / shape) for i in range(5)]
    variance = g[2] - g[1] ** 2
    skew = (g[3] - 3 * g[1] * g[2] + 2 * g[1] ** 3) / variance**1.5
    fourth = g[4] - 4 * g[1] * g[3] + 6 * g[1] ** 2 * g[2] - 3 * g[1] ** 4
    return skew, fourth / variance**2


def clamped_poisson(rng: np.random.Generator) -> Iterator[float]:
    """As one simulator has it: no gap beyond three times the mean."""
    return iter(np.cumsum(np.minimum(rng.exponential(1 / RATE, COUNT), 3 / RATE)).tolist())


def test_constant() -> None:
    found = list(itertools.islice(arrivals.constant(4.0), 9))
    assert found == [i / 4 for i in range(9)]
    assert list(itertools.islice(arrivals.constant(3.0), 3_001))[-1] == 1000.0, "no error adds up"


def test_poisson_has_exponential_gaps_and_a_clamped_one_has_not() -> None:
    def exponential(gaps: np.ndarray) -> np.ndarray:
        return -np.expm1(-RATE * gaps)

    def process(rng: np.random.Generator) -> Iterator[float]:
        return arrivals.poisson(RATE, rng)

    check_rate_and_cv(process, 1.0, 2.0, 9.0)
    check_law(process, exponential)
    with pytest.raises(AssertionError, match="rate"):
        check_rate_and_cv(clamped_poisson, 1.0, 2.0, 9.0)
    with pytest.raises(AssertionError):
        check_law(clamped_poisson, exponential)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gamma_rate_and_cv(cv: float) -> None:
    skew, kurtosis = 2 * cv, 3 + 6 * cv**2
    check_rate_and_cv(lambda rng: arrivals.gamma(RATE, cv, rng), cv, skew, kurtosis)
    if cv != 1:
        with pytest.raises(AssertionError, match="CV"):  # shape 1 / CV for 1 / CV squared
            check_rate_and_cv(
                lambda rng: arrivals.gamma(RATE, math.sqrt(cv), rng), cv, skew, kurtosis
            )


@pytest.mark.parametrize("cv", [0.3, 1.0, 1.8])
def test_weibull_rate_cv_and_law(cv: float) -> None:
    shape = arrivals.weibull_shape(cv)
    assert arrivals.weibull_cv(shape) == pytest.approx(cv, rel=1e-9)
    check_rate_and_cv(lambda rng: arrivals.weibull(RATE, cv, rng), cv, *weibull_moments(shape))
    scale = 1 / (RATE * math.gamma(1 + 1 / shape))
    law = lambda gaps: -np.expm1(-((gaps / scale) ** shape))  # noqa: E731
    check_law(lambda rng: arrivals.weibull(RATE, cv, rng), law)
    if cv != 1:
        with pytest.raises(AssertionError):  # the right rate and CV, and another law
            check_law(lambda rng: arrivals.gamma(RATE, cv, rng), law)
        with pytest.raises(AssertionError, match="rate"):  # a scale that forgets the mean
            wrong = math.gamma(1 + 1 / shape)
            process = lambda rng: (t * wrong for t in arrivals.weibull(RATE, cv, rng))  # noqa: E731
            check_rate_and_cv(process, cv, *weibull_moments(shape))


ON_S, OFF_S = 4.0, 12.0


def check_on_off(process: Process) -> None:
    """The count in a time T has mean rate T and, for large T, the variance of a Poisson process in
    random environment: rate T + 2 T busy^2 p (1 - p) tau, p the share of time that is on and tau
    the time in which the phases forget each other."""
    found = times_of(process)
    span_s = float(found[-1])
    busy = RATE * (ON_S + OFF_S) / ON_S
    share, tau_s = ON_S / (ON_S + OFF_S), ON_S * OFF_S / (ON_S + OFF_S)
    variance = RATE * span_s + 2 * span_s * busy**2 * share * (1 - share) * tau_s
    assert abs(len(found) - RATE * span_s) < 5 * math.sqrt(variance), "rate"
    # Within a phase gaps average 1 / busy; one longer than 20 of these is a pause (e^-20 is not).
    gaps = np.diff(found)
    within = gaps[gaps < 20 / busy]
    assert abs(within.mean() * busy - 1) < 5 / math.sqrt(len(within)) + 0.02, "busy rate"
    pauses = int((gaps >= 20 / busy).sum())
    long_share = math.exp(-20 / busy / OFF_S)  # of the pauses are that long
    expected = span_s / (ON_S + OFF_S) * long_share
    assert abs(pauses - expected) < 5 * math.sqrt(2 * expected), "phases"


def test_on_off_rate_and_phases() -> None:
    check_on_off(lambda rng: arrivals.on_off(RATE, ON_S, OFF_S, rng))
    with pytest.raises(AssertionError, match="rate"):  # the rate of busy phases for that of all
        check_on_off(lambda rng: arrivals.on_off(RATE * ON_S / (ON_S + OFF_S), ON_S, OFF_S, rng))
    with pytest.raises(AssertionError):  # the right rate, and no phases
        check_on_off(lambda rng: arrivals.poisson(RATE, rng))


SWING, PERIOD_S = 0.8, 600.0


def check_diurnal(process: Process) -> None:
    """Time measured in expected arrivals makes it a Poisson process of rate 1: the gaps are
    exponential (the law at 1 in a million), and the count is right at 5 standard errors."""
    found = times_of(process)
    angle = 2 * math.pi / PERIOD_S
    expected = RATE * (found + SWING / angle * (1 - np.cos(angle * found)))
    assert abs(expected[-1] - COUNT) < 5 * math.sqrt(COUNT), "rate"
    check_law(lambda rng: iter(expected.tolist()), lambda gaps: -np.expm1(-gaps))


def test_diurnal_follows_its_sine() -> None:
    check_diurnal(lambda rng: arrivals.diurnal(RATE, SWING, PERIOD_S, rng))
    with pytest.raises(AssertionError):  # thinned to nothing but the mean
        check_diurnal(lambda rng: arrivals.poisson(RATE, rng))
    with pytest.raises(AssertionError):  # not thinned: the peak rate all day
        check_diurnal(lambda rng: arrivals.poisson(RATE * (1 + SWING), rng))


def test_the_same_seed_gives_the_same_times_and_no_global_state_moves() -> None:
    np.random.seed(5)
    before = np.random.get_state()[1].tolist()
    for process in (
        lambda rng: arrivals.poisson(1, rng),
        lambda rng: arrivals.weibull(1, 2, rng),
        lambda rng: arrivals.on_off(1, 2, 3, rng),
        lambda rng: arrivals.diurnal(1, 0.5, 60, rng),
    ):
        first, second = (
            list(itertools.islice(process(np.random.default_rng(1)), 50)) for _ in "ab"
        )
        assert first == second
        assert first != list(itertools.islice(process(np.random.default_rng(2)), 50))
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda rng: arrivals.poisson(0, rng), "rate_per_s"),
        (lambda rng: arrivals.constant(math.nan), "rate_per_s"),
        (lambda rng: arrivals.gamma(1, -1, rng), "cv"),
        (lambda rng: arrivals.weibull(1, 1e9, rng), "cv"),
        (lambda rng: arrivals.on_off(1, 0, 1, rng), "on_s"),
        (lambda rng: arrivals.diurnal(1, 1.5, 9, rng), "swing"),
        (lambda rng: arrivals.diurnal(1, 0.5, math.inf, rng), "period_s"),
    ],
)
def test_bad_values_name_their_field(make: Process, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        next(make(np.random.default_rng(0)))
    assert caught.value.field == field
