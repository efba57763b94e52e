"""Laws of arrivals and lengths by name, with broken variants that are noticed.

Unless said otherwise a check compares a statistic of n arrivals or lengths with its expectation and
fails beyond 5 standard errors: a right process fails once in 1.7 million seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from sim.workload import arrivals, lengths
from sim.workload.distributions import is_drawn, parse_arrivals, parse_lengths
from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceRequest
from tests.chi_square import chi_square_z

COUNT = 40_000
RATE = 6.45
Process = Callable[[np.random.Generator], Iterator[float]]


def times_of(process: Process, seed: int = 3) -> np.ndarray:
    times_s = np.asarray(list(itertools.islice(process(np.random.default_rng(seed)), COUNT)))
    assert (np.diff(times_s) >= 0).all() and times_s[0] >= 0
    return times_s


def has_rate(gaps: np.ndarray, cv: float) -> bool:
    return bool(abs(gaps.mean() * RATE - 1) < 5 * cv / math.sqrt(COUNT))


def has_cv(gaps: np.ndarray, cv: float, skew: float, kurtosis: float) -> bool:
    """Compare a CV. Its standard error follows by the delta method from the third and fourth
    standardised moments of a gap."""
    error = cv * math.sqrt(((kurtosis - 1) / 4 + cv**2 - cv * skew) / COUNT)
    return bool(abs(gaps.std() / gaps.mean() - cv) < 5 * error)


def has_law(gaps: np.ndarray, below: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Compare a law by Kolmogorov-Smirnov: sqrt(n) D > 2.7 happens once in a million."""
    gaps = np.sort(gaps)
    ranks = np.arange(len(gaps) + 1) / len(gaps)
    expected = below(gaps)
    distance = max((ranks[1:] - expected).max(), (expected - ranks[:-1]).max())
    return bool(distance * math.sqrt(len(gaps)) < 2.7)


def weibull_moments(shape: float) -> tuple[float, float]:
    """Return skewness and kurtosis."""
    g = [math.gamma(1 + i / shape) for i in range(5)]
    variance = g[2] - g[1] ** 2
    skew = (g[3] - 3 * g[1] * g[2] + 2 * g[1] ** 3) / variance**1.5
    fourth = g[4] - 4 * g[1] * g[3] + 6 * g[1] ** 2 * g[2] - 3 * g[1] ** 4
    return skew, fourth / variance**2


def weibull_law(shape: float) -> Callable[[np.ndarray], np.ndarray]:
    scale = 1 / (RATE * math.gamma(1 + 1 / shape))
    return lambda gaps: -np.expm1(-((gaps / scale) ** shape))


def test_constant() -> None:
    times_s = list(itertools.islice(arrivals.constant(4.0), 9))
    assert times_s == [i / 4 for i in range(9)]
    assert list(itertools.islice(arrivals.constant(3.0), 3_001))[-1] == 1000.0, "no error adds up"


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gamma_rate_and_cv(cv: float) -> None:
    gaps = np.diff(times_of(lambda rng: arrivals.gamma(RATE, cv, rng)))
    assert has_rate(gaps, cv) and has_cv(gaps, cv, 2 * cv, 3 + 6 * cv**2)
    # Broken: shape 1 / CV for 1 / CV squared.
    wrong = np.diff(times_of(lambda rng: arrivals.gamma(RATE, math.sqrt(cv), rng)))
    assert has_cv(wrong, cv, 2 * cv, 3 + 6 * cv**2) is (cv == 1)


@pytest.mark.parametrize("cv", [0.3, 1.0, 1.8])
def test_weibull_rate_cv_and_law(cv: float) -> None:
    shape = arrivals.weibull_shape(cv)
    assert arrivals.weibull_cv(shape) == pytest.approx(cv, rel=1e-9)
    gaps = np.diff(times_of(lambda rng: arrivals.weibull(RATE, cv, rng)))
    assert has_rate(gaps, cv) and has_cv(gaps, cv, *weibull_moments(shape))
    assert has_law(gaps, weibull_law(shape))
    # Broken: the right rate and CV, and another law.
    wrong = np.diff(times_of(lambda rng: arrivals.gamma(RATE, cv, rng)))
    assert has_law(wrong, weibull_law(shape)) is (cv == 1)


ON_S, OFF_S = 4.0, 12.0


def on_off_faults(process: Process) -> list[str]:
    """Return the names of wrong statistics.

    The count in a time T has mean rate T. For large T it has the variance of a Poisson process in a
    random environment: rate T + 2 T busy^2 p (1 - p) tau. p is the share of time that is on, and
    tau the time in which the phases forget each other.
    """
    times_s = times_of(process)
    span_s = float(times_s[-1])
    busy = RATE * (ON_S + OFF_S) / ON_S
    share, tau_s = ON_S / (ON_S + OFF_S), ON_S * OFF_S / (ON_S + OFF_S)
    variance = RATE * span_s + 2 * span_s * busy**2 * share * (1 - share) * tau_s
    # Within a phase gaps average 1 / busy; one longer than 20 of these is a pause (e^-20 is not).
    gaps = np.diff(times_s)
    within = gaps[gaps < 20 / busy]
    checks = {
        "rate": abs(len(times_s) - RATE * span_s) < 5 * math.sqrt(variance),
        "busy rate": abs(within.mean() * busy - 1) < 5 / math.sqrt(len(within)) + 0.02,
    }
    return [name for name, holds in checks.items() if not holds]


def test_on_off_rate_and_phases() -> None:
    assert not on_off_faults(lambda rng: arrivals.on_off(RATE, ON_S, OFF_S, rng))
    slow = RATE * ON_S / (ON_S + OFF_S)  # rate of busy phases in place of the total rate
    assert "rate" in on_off_faults(lambda rng: arrivals.on_off(slow, ON_S, OFF_S, rng))
    assert "busy rate" in on_off_faults(lambda rng: arrivals.poisson(RATE, rng)), "no phases"


SWING, PERIOD_S = 0.8, 600.0


def is_diurnal(process: Process) -> bool:
    """Compare with a sine. In units of expected arrivals it is a Poisson process of rate 1: gaps
    are exponential (the law at 1 in a million), and the count is right at 5 standard errors."""
    times_s = times_of(process)
    angle = 2 * math.pi / PERIOD_S
    expected = RATE * (times_s + SWING / angle * (1 - np.cos(angle * times_s)))
    count_fits = abs(expected[-1] - COUNT) < 5 * math.sqrt(COUNT)
    return bool(count_fits) and has_law(np.diff(expected), lambda gaps: -np.expm1(-gaps))


def test_diurnal_follows_its_sine() -> None:
    assert is_diurnal(lambda rng: arrivals.diurnal(RATE, SWING, PERIOD_S, rng))
    assert not is_diurnal(lambda rng: arrivals.poisson(RATE, rng)), "nothing but the mean"
    assert not is_diurnal(lambda rng: arrivals.poisson(RATE * (1 + SWING), rng)), "not thinned"


DRAWS = 20_000
UNIFORM = np.array([0] * 5 + [1] * 11) / 11
ZIPF = np.concatenate([[0, 0], np.arange(2.0, 51) ** -1.1])
EMPIRICAL = np.array([0, 0, 0.75, 0, 0, 0, 0.25])


def draw(law: lengths.Lengths) -> np.ndarray:
    drawn = law(np.random.default_rng(7), DRAWS)
    assert drawn.dtype == np.int64 and drawn.min() >= 1
    assert drawn.tolist() == law(np.random.default_rng(7), DRAWS).tolist()
    return drawn


@pytest.mark.parametrize(
    ("law", "shares", "right"),
    [
        (lengths.uniform(5, 15), UNIFORM, True),
        (lengths.uniform(5, 14), UNIFORM, False),
        (lengths.zipf(1.1, 2, 50), ZIPF / ZIPF.sum(), True),
        (lengths.zipf(1.0, 2, 50), ZIPF / ZIPF.sum(), False),
        (lengths.empirical([2, 6, 2, 2]), EMPIRICAL, True),
        (lengths.empirical([2, 6]), EMPIRICAL, False),
        (lengths.fixed(3), np.array([0, 0, 0, 1.0]), True),
    ],
)
def test_a_law_has_its_shares_and_another_has_not(
    law: lengths.Lengths, shares: np.ndarray, right: bool
) -> None:
    """`shares[i]` is the chance of length i."""
    counts = np.bincount(draw(law), minlength=len(shares))
    fits = len(counts) == len(shares) and chi_square_z(counts, shares) < 5
    assert fits == right


def test_lognormal_mean_and_cv() -> None:
    """Kurtosis of a lognormal: w^4 + 2 w^3 + 3 w^2 - 3 with w = 1 + CV^2; skewness CV (w + 2)."""
    drawn, w = draw(lengths.lognormal(800, 0.7)), 1 + 0.7**2
    assert abs(drawn.mean() - 800) < 5 * 800 * 0.7 / math.sqrt(DRAWS) + 0.01
    kurtosis, skew = w**4 + 2 * w**3 + 3 * w**2 - 3, 0.7 * (w + 2)
    error = 0.7 * math.sqrt(((kurtosis - 1) / 4 + w - 1 - 0.7 * skew) / DRAWS)
    assert abs(drawn.std() / drawn.mean() - 0.7) < 5 * error


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("constant:4", arrivals.constant(4.0)),
        ("poisson:0.5", arrivals.poisson(0.5, rng())),
        ("gamma:5,2", arrivals.gamma(5.0, 2.0, rng())),
        ("weibull:5,0.5", arrivals.weibull(5.0, 0.5, rng())),
        ("onoff:5,3,9", arrivals.on_off(5.0, 3.0, 9.0, rng())),
        ("diurnal:5,0.5,60", arrivals.diurnal(5.0, 0.5, 60.0, rng())),
    ],
)
def test_arrivals_by_name(text: str, process: Iterator[float]) -> None:
    process_by_name = parse_arrivals("--arrivals", text)(rng())
    assert list(islice(process_by_name, 50)) == list(islice(process, 50))
    assert is_drawn(text) == (not text.startswith("constant"))


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = (
        TraceRequest(arrival_s=float(i), prompt_tokens=10 + i, output_tokens=100 + i)
        for i in range(3)
    )
    write_requests(path, requests)
    for column, least in (("prompt_tokens", 10), ("output_tokens", 100)):
        sampled = parse_lengths("--prompt", f"empirical:{path}", column)(rng(), 200)
        assert set(sampled.tolist()) == {least, least + 1, least + 2}


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_arrivals, "poison:5", "is not known; write one of constant:RATE, poisson:RATE"),
        (parse_arrivals, "poisson", "is not known"),
        (parse_arrivals, "gamma:5", "is not known"),
        (parse_arrivals, "poisson:nan", "RATE nan is not allowed"),
        (parse_arrivals, "gamma:5,0", "cv 0.0 is not allowed"),
        (parse_arrivals, "gamma:1,1e300", "CV 1e+300 is not allowed"),
        (parse_arrivals, "onoff:1000,1e9,1", "on_s makes more than 1e7 requests"),
        (parse_arrivals, "weibull:1,1e9", "cv 1000000000.0 is not allowed"),
        (parse_arrivals, "diurnal:5,2,60", "swing 2.0 is not allowed"),
        (parse_lengths, "fixed:0", "tokens 0 is not allowed"),
        (parse_lengths, "fixed:1.5", "TOKENS is not a whole number"),
        (parse_lengths, "uniform:5,2", "high 2 is below low"),
        (parse_lengths, "zipf:-1,1,2", "exponent -1.0 is not allowed"),
        (parse_lengths, "lognormal:9,1,inf", "MOST inf is not allowed"),
        (parse_lengths, "empirical:", "is not known; write one of N, fixed:TOKENS"),
        (parse_lengths, "empirical:/no/such/trace", "/no/such/trace: file: cannot be read"),
    ],
)
def test_bad_laws_name_their_option(parse: Any, text: str, words: str) -> None:
    more = ("prompt_tokens",) if parse is parse_lengths else ()
    with pytest.raises(FieldError) as caught:
        parse("--law", text, *more)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--law: ") or "/no/such" in text
