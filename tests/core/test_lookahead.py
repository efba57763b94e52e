"""The estimator and the policies. Bounds of the estimator: |bias| <= 0.005, RMSE <= 0.075."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.config import LookaheadConfig
from cbatch.core.errors import FieldError
from cbatch.core.lookahead import choose_lookahead, drift, observe, survival

EMA = LookaheadConfig(policy="ema", k=8)
ALL = slice(0, 3)
CAPS = np.full(3, 8, dtype=np.int32)


def prior(rows: int) -> np.ndarray:
    trials = np.full(rows, EMA.prior_trials)
    return np.stack([trials * EMA.prior_acceptance, trials])


def simulate(alpha: float, k: int, rows: int, steps: int, seed: int) -> np.ndarray:
    """Estimates after `steps` verifications of k drafts, each accepted with chance alpha."""
    rng = np.random.default_rng(seed)
    estimate = prior(rows)
    drafted = np.full(rows, k, dtype=np.int32)
    for _ in range(steps):
        coins = rng.random((rows, k)) < alpha
        accepted = np.cumprod(coins, axis=1).sum(axis=1).astype(np.int32)
        estimate = observe(EMA, estimate, drafted, accepted)
    return estimate[0] / estimate[1]


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.95])
def test_the_estimate_is_unbiased_and_as_sharp_for_every_k(alpha: float) -> None:
    """Trap 3 (accepted / k is biased, and more so the larger k is)."""
    errors = {}
    for k in (1, 2, 4, 8):
        found = simulate(alpha, k, rows=4000, steps=300, seed=k)
        assert abs(found.mean() - alpha) <= 0.005
        errors[k] = float(np.sqrt(np.mean((found - alpha) ** 2)))
    assert max(errors.values()) <= 0.075
    assert max(errors.values()) <= 1.1 * min(errors.values())


def test_the_mean_of_accepted_over_k_would_be_caught() -> None:
    """Trap 3 (accepted / k is biased). The broken estimator that the bound above must reject: at
    alpha 0.7, k 4 it reads 0.44."""
    rng = np.random.default_rng(0)
    coins = rng.random((4000, 4)) < 0.7
    naive = np.cumprod(coins, axis=1).sum(axis=1).mean() / 4
    assert abs(naive - 0.7) > 0.2


def test_positions_after_the_first_rejection_are_no_trials() -> None:
    before = prior(1)
    after = observe(EMA, before, np.array([8], np.int32), np.array([2], np.int32))
    assert after[1, 0] == pytest.approx(before[1, 0] * EMA.decay**3 + 3)
    assert after[0, 0] == pytest.approx(before[0, 0] * EMA.decay**3 + 2)


def test_survival_is_the_beta_moment_and_never_rises_along_a_row() -> None:
    estimate = np.array([[7.0, 1.0], [10.0, 10.0]])
    s = survival(estimate[0], estimate[1], 6)
    assert s[0, 0] == pytest.approx(0.7)
    assert s[0, 1] == pytest.approx(0.7 * 8 / 11)
    assert (np.diff(s, axis=1) <= 0).all()
    assert (s[0] >= 0.7 ** np.arange(1, 7)).all()  # Jensen: mild optimism


def test_k_follows_acceptance_and_zero_is_not_absorbing() -> None:
    """Trap 4 (k = 0 absorbs)."""
    estimate = np.array([[30.0, 20.0, 2.0], [31.0, 31.0, 31.0]])
    k = choose_lookahead(EMA, estimate, ALL, CAPS)
    assert k[0] == 8 and 2 <= k[1] <= 4 and k[2] == 0
    idle = estimate
    for _ in range(500):
        idle = drift(EMA, idle)
    assert (choose_lookahead(EMA, idle, ALL, CAPS) >= 2).all()


def test_the_simple_policies() -> None:
    estimate = prior(3)
    caps = np.array([5, 5, 2], dtype=np.int32)
    off, fixed = LookaheadConfig(policy="off"), LookaheadConfig(policy="fixed", k=5)
    assert choose_lookahead(off, estimate, ALL, caps).tolist() == [0, 0, 0]
    assert choose_lookahead(fixed, estimate, ALL, caps).tolist() == [5, 5, 2]


@pytest.mark.parametrize("field", ["k", "decay", "prior_acceptance", "min_survival"])
def test_bad_configuration_names_its_field(field: str) -> None:
    with pytest.raises(FieldError, match=f"lookahead.{field}"):
        LookaheadConfig(**{field: 0})
