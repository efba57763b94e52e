"""Laws of lengths over 20,000 draws. Means and CVs at 5 standard errors, laws by chi-square at
z = 5: a right one fails once in a million seeds or less."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cbatch.core.errors import FieldError
from sim import lengths
from tests.chi_square import chi_square_z

COUNT = 20_000


def draw(law: lengths.Lengths) -> np.ndarray:
    found = law(np.random.default_rng(7), COUNT)
    assert found.dtype == np.int64 and found.min() >= 1
    assert found.tolist() == law(np.random.default_rng(7), COUNT).tolist()
    return found


def check_law(law: lengths.Lengths, shares: np.ndarray) -> None:
    """`shares[i]` is the chance of length i."""
    counts = np.bincount(draw(law), minlength=len(shares))
    assert len(counts) == len(shares) and chi_square_z(counts, shares) < 5


def test_fixed() -> None:
    assert set(draw(lengths.fixed(12)).tolist()) == {12}


def test_uniform_has_both_ends() -> None:
    shares = np.array([0] * 5 + [1] * 11)
    check_law(lengths.uniform(5, 15), shares / 11)
    with pytest.raises(AssertionError):
        check_law(lengths.uniform(5, 14), shares / 11)


def test_zipf() -> None:
    shares = np.arange(51, dtype=float)
    shares[2:] **= -1.1
    shares[:2] = 0
    shares /= shares.sum()
    check_law(lengths.zipf(1.1, 2, 50), shares)
    with pytest.raises(AssertionError):
        check_law(lengths.zipf(1.0, 2, 50), shares)


def check_lognormal(law: lengths.Lengths, mean: float, cv: float) -> None:
    """Kurtosis of a lognormal: w^4 + 2 w^3 + 3 w^2 - 3 with w = 1 + CV^2; skewness CV (w + 2)."""
    found, w = draw(law), 1 + cv**2
    assert abs(found.mean() - mean) < 5 * mean * cv / math.sqrt(COUNT) + 0.01, "mean"
    kurtosis, skew = w**4 + 2 * w**3 + 3 * w**2 - 3, cv * (w + 2)
    error = cv * math.sqrt(((kurtosis - 1) / 4 + w - 1 - cv * skew) / COUNT)
    assert abs(found.std() / found.mean() - cv) < 5 * error, "CV"


def test_lognormal_mean_and_cv() -> None:
    check_lognormal(lengths.lognormal(800, 0.7), 800, 0.7)
    with pytest.raises(AssertionError, match="mean"):  # the median for the mean
        check_lognormal(lengths.lognormal(800 * math.sqrt(1 + 0.7**2), 0.7), 800, 0.7)
    with pytest.raises(AssertionError, match="CV"):  # the CV for the sigma of the logarithm
        wrong = math.sqrt(math.expm1(0.7**2))
        check_lognormal(lengths.lognormal(800, wrong), 800, 0.7)
    assert draw(lengths.lognormal(800, 0.7, high=900)).max() == 900
    assert set(draw(lengths.lognormal(5, 0)).tolist()) == {5}


def test_empirical() -> None:
    shares = np.array([0, 0, 0.75, 0, 0, 0, 0.25])
    check_law(lengths.empirical([2, 6, 2, 2]), shares)
    with pytest.raises(AssertionError):
        check_law(lengths.empirical([2, 6]), shares)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: lengths.fixed(0), "tokens"),
        (lambda: lengths.uniform(5, 4), "high"),
        (lambda: lengths.lognormal(math.nan, 1), "mean"),
        (lambda: lengths.lognormal(3, -1), "cv"),
        (lambda: lengths.zipf(-1, 1, 2), "exponent"),
        (lambda: lengths.empirical([]), "tokens"),
        (lambda: lengths.empirical([3, 0]), "tokens"),
    ],
)
def test_bad_values_name_their_field(make, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.field == field
