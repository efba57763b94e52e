"""What `goodput` learns of the other way to serve, where the first steps of it take longer."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.speculation import goodput_policy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.cost_model import CostProfile
from cbatch.core.speculation.goodput_policy import GoodputPolicy
from cbatch.core.speculation.policy import PolicyLimits
from cbatch.core.speculation.step_work import StepSample
from tests.helpers import DraftedRows, RowsToPlan, decoding

PLAIN_S, DRAFT_S = 1e-3, 0.9e-3  # one row; what each draft takes besides
COLD = 0.55  # of a step, that the first one behind drafts takes longer; less, the further behind
WARMS = 0.8  # to that share, step by step
ACCEPTED = 0.7  # 1.7 tokens in 1.9 ms: less than a step without drafts, more than a cold one
STEADY_S, FIRST_S = 0.5e-3, 0.85e-3  # what a draft takes for good, and behind steps without


def share_with_drafts(steps: int = 2000) -> float:
    """Of the last half of so many steps of one row."""
    profile = CostProfile(
        (1, 2, 3), tuple(PLAIN_S * (1 + COLD) + n * DRAFT_S for n in range(3)), draft_pass_s=1e-9
    )
    policy = GoodputPolicy(LookaheadConfig(policy="goodput", k=2), PolicyLimits(1, 3, profile))
    policy.enter(0, (70.0, 100.0))
    rng, since, drafted = np.random.default_rng(0), 0, []
    for _ in range(steps):
        chosen = policy.choose(RowsToPlan(slice(0, 1), np.full(1, 2, np.int32), 2))
        k = np.zeros(1, np.int32) if chosen is None else chosen
        count = int(k[0])
        accepted = np.array([np.cumprod(rng.random(count) < ACCEPTED).sum()], np.int32)
        cold = 1.0 if count else 1 + COLD * WARMS**since
        since = 0 if count else since + 1
        sample = StepSample(
            decoding(1, drafts=count, depth=count), 1e-9 * count, PLAIN_S * cold + DRAFT_S * count
        )
        policy.observe(DraftedRows(slice(0, 1), k, accepted, sample))
        drafted.append(count > 0)
    return float(np.mean(drafted[steps // 2 :]))


def test_drafts_that_beat_only_the_steps_behind_drafts_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With experiments of a few steps, whatever is won, the warm ones are never seen."""
    assert share_with_drafts() < 0.05
    monkeypatch.setattr(goodput_policy, "LEAST_IDLE_STEPS", goodput_policy.LEAST_STEPS)
    assert share_with_drafts() > 0.5


def share_with_drafts_that_pay_for_good(steps: int = 4000) -> float:
    """1.7 tokens in 1.5 ms, but in 1.85 ms at first, which is what the profile says. Of the last
    half of so many steps of one row."""
    profile = CostProfile((1, 2), (PLAIN_S, PLAIN_S + FIRST_S), draft_pass_s=1e-9)
    policy = GoodputPolicy(LookaheadConfig(policy="goodput", k=1), PolicyLimits(1, 2, profile))
    policy.enter(0, (70.0, 100.0))
    rng, behind, drafted = np.random.default_rng(0), 0, []
    for _ in range(steps):
        chosen = policy.choose(RowsToPlan(slice(0, 1), np.full(1, 1, np.int32), 1))
        k = np.zeros(1, np.int32) if chosen is None else chosen
        count = int(k[0])
        draft_s = count * (STEADY_S + (FIRST_S - STEADY_S) * 0.5**behind)
        behind = behind + 1 if count else 0
        accepted = (count * (rng.random(1) < ACCEPTED)).astype(np.int32)
        sample = StepSample(decoding(1, drafts=count, depth=count), 1e-9 * count, PLAIN_S + draft_s)
        policy.observe(DraftedRows(slice(0, 1), k, accepted, sample))
        drafted.append(count > 0)
    return float(np.mean(drafted[steps // 2 :]))


def test_drafts_that_pay_only_among_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With probes of a single step they never are."""
    assert share_with_drafts_that_pay_for_good() > 0.7
    monkeypatch.setattr(goodput_policy, "LEAST_STEPS", 1)
    assert share_with_drafts_that_pay_for_good() < 0.1
