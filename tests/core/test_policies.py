"""The policy `ema`; its estimator is in test_acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.acceptance import survival
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policies import EmaPolicy
from cbatch.core.speculation.policy import PolicyLimits
from tests.helpers import DraftedRows, RowsToPlan

EMA = LookaheadConfig(policy="ema", k=8)
CAPS = np.full(3, 8, dtype=np.int32)


def policy_of(*carried: tuple[float, float] | None) -> EmaPolicy:
    policy = EmaPolicy(EMA, PolicyLimits(len(carried), 64))
    for slot, sums in enumerate(carried):
        policy.enter(slot, sums)
    return policy


def test_positions_after_the_first_rejection_are_no_trials() -> None:
    policy = policy_of((4.0, 6.0))
    policy.observe(DraftedRows(slice(0, 1), np.array([8], np.int32), np.array([2], np.int32)))
    assert policy.leave(0) == pytest.approx((4 * EMA.decay**3 + 2, 6 * EMA.decay**3 + 3))


def test_survival_is_the_beta_moment_and_never_rises_along_a_row() -> None:
    estimate = np.array([[7.0, 1.0], [10.0, 10.0]])
    s = survival(estimate[0], estimate[1], 6)
    assert s[0, 0] == pytest.approx(0.7)
    assert s[0, 1] == pytest.approx(0.7 * 8 / 11)
    assert (np.diff(s, axis=1) <= 0).all()
    assert (s[0] >= 0.7 ** np.arange(1, 7)).all()  # Jensen's inequality: mildly optimistic


def test_k_follows_acceptance_and_zero_is_not_absorbing() -> None:
    """Trap 4 (k = 0 absorbs)."""
    policy, zero = policy_of((30.0, 31.0), (20.0, 31.0), (2.0, 31.0)), np.zeros(3, np.int32)
    k = policy.choose(RowsToPlan(slice(0, 3), CAPS))
    assert k is not None and k[0] == 8 and 2 <= k[1] <= 4 and k[2] == 0
    for _ in range(500):
        policy.observe(DraftedRows(slice(0, 3), zero, zero))
    k = policy.choose(RowsToPlan(slice(0, 3), CAPS))
    assert k is not None and (k >= 2).all()


@pytest.mark.parametrize("field", ["k", "decay", "prior_acceptance", "min_survival"])
def test_bad_configuration_names_its_field(field: str) -> None:
    with pytest.raises(FieldError, match=f"lookahead.{field}"):
        LookaheadConfig(**{field: 0})
