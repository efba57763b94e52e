"""Laws of lengths over 20,000 draws. Means and CVs at 5 standard errors, laws by chi-square at
z = 5: a right one fails once in a million seeds or less."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.workload import lengths
from tests.chi_square import chi_square_z

COUNT = 20_000
UNIFORM = np.array([0] * 5 + [1] * 11) / 11
ZIPF = np.concatenate([[0, 0], np.arange(2.0, 51) ** -1.1])
EMPIRICAL = np.array([0, 0, 0.75, 0, 0, 0, 0.25])


def draw(law: lengths.Lengths) -> np.ndarray:
    drawn = law(np.random.default_rng(7), COUNT)
    assert drawn.dtype == np.int64 and drawn.min() >= 1
    assert drawn.tolist() == law(np.random.default_rng(7), COUNT).tolist()
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


@pytest.mark.parametrize(
    ("mean", "cv", "wrong"),
    [
        (800, 0.7, None),
        (800 * math.sqrt(1 + 0.7**2), 0.7, "mean"),  # the median in place of the mean
        (800, math.sqrt(math.expm1(0.7**2)), "CV"),  # the CV in place of the sigma of the logarithm
    ],
)
def test_lognormal_mean_and_cv(mean: float, cv: float, wrong: str | None) -> None:
    """The mean is 800 and the CV 0.7. Kurtosis of a lognormal: w^4 + 2 w^3 + 3 w^2 - 3 with w = 1 +
    CV^2; skewness CV (w + 2)."""
    drawn, w = draw(lengths.lognormal(mean, cv)), 1 + 0.7**2
    mean_fits = abs(drawn.mean() - 800) < 5 * 800 * 0.7 / math.sqrt(COUNT) + 0.01
    kurtosis, skew = w**4 + 2 * w**3 + 3 * w**2 - 3, 0.7 * (w + 2)
    error = 0.7 * math.sqrt(((kurtosis - 1) / 4 + w - 1 - 0.7 * skew) / COUNT)
    cv_fits = abs(drawn.std() / drawn.mean() - 0.7) < 5 * error
    assert (bool(mean_fits), bool(cv_fits)) == (wrong != "mean", wrong != "CV")


def test_lognormal_is_cut_and_may_be_certain() -> None:
    assert draw(lengths.lognormal(800, 0.7, high=900)).max() == 900
    assert set(draw(lengths.lognormal(5, 0)).tolist()) == {5}
