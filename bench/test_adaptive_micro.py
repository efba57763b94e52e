"""Micro-benchmark (`pytest bench --benchmark-enable`) of the `adaptive` decision for 256 rows of up
to 8 drafts each.

Profile `flat` is memory-bound at this load, `steep` compute-bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.speculation.acceptance import survival
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.draft_allocation import decide
from cbatch.core.speculation.policy import PolicyLimits

ROWS, DEPTH = 256, 8
TOKENS = ROWS * (1 + DEPTH)
PROFILES = {
    "flat": CostProfile(10e-3, 8e-6, 4.0, draft_pass_s=3e-4, draft_token_s=2e-6),
    "steep": CostProfile(10e-3, 83e-6, draft_pass_s=1e-3, draft_token_s=1e-5),
}


def inputs(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return accepted drafts, trials and maximum depths of rows whose acceptance is about 2/3."""
    rng = np.random.default_rng(0)
    trials = rng.uniform(8, 25, rows)
    return rng.beta(6, 3, rows) * trials, trials, np.full(rows, DEPTH, np.int32)


class FakePlannedRows(NamedTuple):
    """Implements `policy.PlannedRows`."""

    rows: slice
    max_drafts: np.ndarray
    draft_kv_lag: np.ndarray
    remaining_tokens: np.ndarray
    budget_tokens: int = TOKENS
    context_tokens: int = 0
    num_prompts: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.max_drafts)


def planned_rows(rows: int) -> FakePlannedRows:
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    return FakePlannedRows(slice(0, rows), inputs(rows)[2], zeros, ones)


def policy_of(kind: str, rows: int) -> AdaptivePolicy:
    """Return a policy with estimates for these rows."""
    policy = AdaptivePolicy(
        LookaheadConfig(policy="adaptive", k=DEPTH),
        PolicyLimits(rows, TOKENS, StepCosts(PROFILES[kind])),
    )
    policy.estimate[:] = inputs(rows)[:2]
    work = StepWork(rows=rows, target_tokens=rows, logit_tokens=rows)
    for _ in range(2):  # without these, the policy would first test the profile's prices
        policy.costs.observe(StepSample(work, *PROFILES[kind].step_s(work)))
    return policy


@pytest.mark.parametrize("kind", PROFILES)
def test_decide(benchmark, kind):
    accepted, trials, caps = inputs(ROWS)
    chances = survival(accepted, trials, DEPTH).T
    prices = StepCosts(PROFILES[kind]).prices(ROWS, 0, ROWS * DEPTH)
    before = None
    for _ in range(5):
        before = decide(chances, caps, prices, before)
    decision = benchmark(decide, chances, caps, prices, before)
    assert (decision.num_drafts.sum() > 0) == (kind != "steep")


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_whole_choice(benchmark, rows):
    """Time `choose`, called again and again for the same rows. Most calls keep the last
    decision."""
    k = benchmark(policy_of("flat", rows).choose, planned_rows(rows))
    assert k is not None and k.any()
