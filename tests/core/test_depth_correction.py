"""The correction of acceptance by depth: learnt from what is reached, and of nothing else.

Over 40 000 rows the last depth is reached some 650 times: survival there has a standard error of
3 %, at lesser depths a smaller one. A bound of 10 % fails by chance once in a thousand seeds.
"""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.speculation import depth_correction as depths
from cbatch.core.speculation.acceptance import survival
from cbatch.core.speculation.depth_correction import DepthOdds

DEPTH, ROWS = 6, 500
RISING = np.array([0.5, 0.58, 0.66, 0.7, 0.72, 0.72])  # given that the draft before was accepted
FALLING = RISING[::-1].copy()


def outcomes(rng: np.random.Generator, hazards: np.ndarray, k: np.ndarray) -> np.ndarray:
    hits = np.logical_and.accumulate(rng.random((len(k), DEPTH)) < hazards, axis=1)
    accepted: np.ndarray = np.minimum(hits.sum(axis=1), k).astype(np.int32)
    return accepted


def believed(alpha: float, trials: float = 25.0) -> np.ndarray:
    return np.stack([np.full(ROWS, alpha * trials), np.full(ROWS, trials)])


def learnt(hazards: np.ndarray, steps: int = 80, *, leak: bool = False) -> tuple[DepthOdds, float]:
    """After steps of ragged k; and the acceptance that a row is believed to have: of all trials."""
    rng, found = np.random.default_rng(3), DepthOdds(DEPTH)
    alive = np.cumprod(hazards)
    alpha = float(alive.sum() / (1 + alive[:-1].sum()))
    for _ in range(steps):
        k = rng.integers(1, DEPTH + 1, ROWS).astype(np.int32)
        accepted = outcomes(rng, hazards, k)
        found.observe(believed(alpha), np.full_like(k, DEPTH) if leak else k, accepted)
    return found, alpha


@pytest.mark.parametrize("hazards", [RISING, FALLING], ids=["rising", "falling"])
def test_survival_is_as_observed_whatever_the_profile(
    hazards: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "_MEMORY", 1e5)  # of all that was seen: what remains is bias
    found, alpha = learnt(hazards)
    one = believed(alpha)[:, :1]
    truth = np.cumprod(hazards)
    assert survival(*one, DEPTH, found.odds)[0] == pytest.approx(truth, rel=0.1)
    assert np.abs(survival(*one, DEPTH)[0] / truth - 1).max() > 0.15  # and it was needed
    censored, _ = learnt(hazards, leak=True)  # broken: what was not drafted counts as refused
    assert survival(*one, DEPTH, censored.odds)[0, -1] < 0.7 * truth[-1]


def test_an_estimate_that_is_right_is_left_alone() -> None:
    """Rows of a Beta law, each with 25 trials' worth of it: their moments are the truth."""
    rng, found = np.random.default_rng(4), DepthOdds(DEPTH)
    a, b = 15.0, 10.0
    for _ in range(80):
        alphas = rng.beta(a, b, (ROWS, 1))
        k = rng.integers(1, DEPTH + 1, ROWS).astype(np.int32)
        found.observe(np.tile([[a], [a + b]], ROWS), k, outcomes(rng, alphas, k))
    assert found.odds == pytest.approx(np.ones(DEPTH), abs=0.25)


def test_the_priors_mistake_is_not_the_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests start from a prior of 0.7 and are worth 0.1: until they have said so, what was
    expected says nothing of depth."""

    def after_a_few_steps() -> float:
        rng, found = np.random.default_rng(5), DepthOdds(DEPTH)
        k = np.full(20, 2, np.int32)
        for _ in range(5):
            found.observe(believed(0.7)[:, :20], k, outcomes(rng, np.full((20, 1), 0.1), k))
        return float(found.odds[0])

    assert after_a_few_steps() == 1.0
    monkeypatch.setattr(depths, "_UNSETTLED", 0)
    assert after_a_few_steps() < 0.5


def test_factors_stay_within_bounds_and_survival_never_rises() -> None:
    found = DepthOdds(DEPTH)
    k = np.full(ROWS, DEPTH, np.int32)
    for accepted in (np.zeros(ROWS, np.int32), k):
        for _ in range(30):
            found.observe(believed(0.5), k, accepted)
            assert (found.odds >= 0.25).all() and (found.odds <= 4).all()
            chances = survival(*believed(0.5), DEPTH, found.odds)
            assert (np.diff(chances, axis=1) <= 0).all() and (chances <= 1).all()


def counted(seed: int) -> np.ndarray:
    """Predicted and observed survivors over drafts, float [2, depth]: rows of a Beta law, each with
    25 trials' worth of it, so that what is believed of them is the truth."""
    rng, found = np.random.default_rng(seed), DepthOdds(DEPTH)
    for _ in range(80):
        k = rng.integers(1, DEPTH + 1, ROWS).astype(np.int32)
        accepted = outcomes(rng, rng.beta(15.0, 10.0, (ROWS, 1)), k)
        found.observe(np.tile([[15.0], [25.0]], ROWS), k, accepted)
    told = found.calibration
    return np.array([told.predicted, told.survived]) / np.array(told.drafted)


def test_what_was_predicted_and_what_came_of_it_are_counted_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One observation in four counts: of 10 000 rows the last depth is drafted some 1 700 times,
    where survival has a standard error of 0.008: 0.04 is five of them."""
    predicted, survived = counted(6)
    assert predicted == pytest.approx(survived, abs=0.04) and predicted[-1] < predicted[0] - 0.2
    real = (
        depths.acceptance.survival
    )  # broken: hazards, each given those before it, are no survival
    monkeypatch.setattr(
        depths.acceptance,
        "survival",
        lambda n, d, depth, odds: np.repeat(real(n, d, 1, odds[:1]), depth, axis=1),
    )
    assert counted(6)[0, -1] > survived[-1] + 0.2
