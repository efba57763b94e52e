"""Experiments of `adaptive` with drafting and with not drafting, where the first steps after a
change are slower."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample
from cbatch.core.speculation import adaptive_policy
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits
from tests.helpers import DraftedRows, RowsToPlan, decoding

PLAIN_S, DRAFT_S = 1e-3, 0.9e-3  # of one row; of each draft in addition
COLD = 0.55  # share by which the first step after a step with drafts is slower
WARMS = 0.8  # of that share each further step without drafts keeps this much
ACCEPTED = 0.7  # 1.7 tokens in 1.9 ms: less than a step without drafts, more than a cold one
SEEDS = 4


def chosen(policy: AdaptivePolicy, rows: int, depth: int) -> np.ndarray:
    """Return k of `rows` rows that may each draft `depth` tokens."""
    caps = np.full(rows, depth, np.int32)
    k = policy.choose(RowsToPlan(slice(0, rows), caps, rows * depth))
    return np.zeros_like(caps) if k is None else k


def share_with_drafts(
    depth: int, profile: CostProfile, step_s: Callable[[int, int], float], steps: int
) -> float:
    """Return the share of steps with drafts in the second half of `steps` steps of one row,
    averaged over seeds.

    `step_s(drafts, same)` is the duration of a step after `same` steps of its kind (with or without
    drafts).
    """
    return float(np.mean([of_one(depth, profile, step_s, steps, seed) for seed in range(SEEDS)]))


def of_one(
    depth: int, profile: CostProfile, step_s: Callable[[int, int], float], steps: int, seed: int
) -> float:
    """Return the share for one seed."""
    limits = PolicyLimits(1, 1 + depth, StepCosts(profile))
    policy = AdaptivePolicy(LookaheadConfig(policy="adaptive", k=depth), limits)
    policy.enter(0, (70.0, 100.0))
    rng, behind, drafted = np.random.default_rng(seed), 0, [True]
    for _ in range(steps):
        k = chosen(policy, 1, depth)
        count = int(k[0])
        accepted = np.array([np.cumprod(rng.random(count) < ACCEPTED).sum()], np.int32)
        behind = behind + 1 if drafted[-1] == (count > 0) else 0
        work = decoding(1, drafts=count, depth=count)
        sample = StepSample(work, 1e-9 * count, step_s(count, behind))
        policy.observe(DraftedRows(slice(0, 1), k, accepted, sample))
        drafted.append(count > 0)
    return float(np.mean(drafted[1 + steps // 2 :]))


def share_where_steps_after_drafts_are_slow() -> float:
    return share_with_drafts(
        2,
        CostProfile(PLAIN_S * (1 + COLD) - DRAFT_S, DRAFT_S, draft_pass_s=1e-9),
        lambda count, behind: (
            PLAIN_S * (1 if count else 1 + COLD * WARMS**behind) + DRAFT_S * count
        ),
        steps=1200,
    )


def test_drafts_faster_only_than_the_first_steps_without_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With experiments of only a few steps, whatever the gain, the warm steps are never
    measured."""
    assert share_where_steps_after_drafts_are_slow() < 0.1
    shortest = adaptive_policy.MIN_EXPERIMENT_STEPS
    monkeypatch.setattr(adaptive_policy, "MAX_EXPERIMENT_STEPS", shortest)
    assert share_where_steps_after_drafts_are_slow() > 0.5


def test_a_price_is_not_first_learnt_of_the_step_that_was_decided_in() -> None:
    """The cost of drafts is unknown until some are tried, and the first two steps with drafts cost
    more than they gain. A policy that prices by those two steps never drafts again: 0.01."""
    share = share_with_drafts(
        2,
        CostProfile(PLAIN_S, 0.01 * PLAIN_S, draft_pass_s=1e-9),
        lambda count, behind: PLAIN_S * (1 + (count > 0) * (1.4 if behind < 2 else 0.7)),
        steps=1000,
    )
    assert share > 0.9


def test_a_step_without_drafts_is_tried_soon_where_prompts_are_never_far() -> None:
    """A step with drafts, 0.9 of them accepted, takes twice as long. Prompts are in the first 100
    steps and in half of the others.

    The duration of a step without drafts and prompts is a guess until one is tried. The guess
    equals a step with drafts, which makes drafts look like a gain of 0.9. A policy that waits until
    a trial pays by that guess still drafts after 300 steps.
    """
    rows = 64
    policy = AdaptivePolicy(LookaheadConfig(policy="adaptive", k=1), PolicyLimits(rows, 4 * rows))
    for slot in range(rows):
        policy.enter(slot, (90.0, 100.0))
    accepted = np.arange(rows) < 0.9 * rows
    rng, drafted = np.random.default_rng(0), []
    for step in range(300):
        k = chosen(policy, rows, 1)
        count, chunk = int(k.sum()), 2 * rows * int(step < 100 or rng.random() < 0.5)
        work = decoding(rows, drafts=count, depth=1 if count else 0)
        work.target_tokens += chunk
        work.prefill_tokens = chunk
        sample = StepSample(work, 1e-9 * count, PLAIN_S * (1 + (count + chunk) / rows))
        policy.observe(DraftedRows(slice(0, rows), k, k * accepted, sample))
        if chunk:
            policy.costs.observe(sample)  # as a scheduler does
        drafted.append(count > 0)
    assert np.mean(drafted[20:100]) > 0.5 and np.mean(drafted[150:]) < 0.1


@pytest.mark.parametrize("draft_s", [0.0, 7.5e-3 / 32])
def test_drafts_that_take_far_longer_than_profiled_soon_cease(draft_s: float) -> None:
    """A full step of drafts takes four times as long as a plain one; the profile says 1.1 times.
    Its price is per step, or half of it per draft."""
    rows, depth, steps, plain_s = 8, 4, 2000, 5e-3
    costs = StepCosts(CostProfile(0.975 * plain_s, 0.1 * plain_s / 32))
    policy = AdaptivePolicy(
        LookaheadConfig(policy="adaptive", k=depth), PolicyLimits(rows, rows * (1 + depth), costs)
    )
    for slot in range(rows):
        policy.enter(slot, None)
    rng, tokens, seconds = np.random.default_rng(0), np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        k = chosen(policy, rows, depth)
        runs = np.cumprod(rng.random((rows, depth)) < 0.7, axis=1).sum(axis=1)
        accepted, drafts = np.minimum(runs, k).astype(np.int32), int(k.sum())
        verify_s = 3 * plain_s - 32 * draft_s
        seconds[step] = plain_s + verify_s * (drafts > 0) + draft_s * drafts
        cost = StepSample(decoding(rows, drafts=drafts, depth=int(k.max())), 0.0, seconds[step])
        policy.observe(DraftedRows(slice(0, rows), k, accepted, cost))
        tokens[step] = rows + accepted.sum()
    speeds = [float(tokens[s].sum() / seconds[s].sum()) for s in (slice(100), slice(1000, None))]
    to_off = [speed * plain_s / rows for speed in speeds]
    assert to_off[0] < 0.9 and to_off[1] >= 0.98, to_off


def test_prices_are_learned_where_prompts_come_and_go() -> None:
    """A prompt waits before every third step."""
    costs = StepCosts(CostProfile(PLAIN_S))
    policy = AdaptivePolicy(LookaheadConfig(policy="adaptive", k=1), PolicyLimits(4, 8, costs))
    for slot in range(4):
        policy.enter(slot, None)
    caps = np.ones(4, np.int32)
    for step in range(40):
        k = policy.choose(RowsToPlan(slice(0, 4), caps, 4, num_prompts=int(step % 3 == 0)))
        k = 0 * caps if k is None else k
        sample = StepSample(decoding(4, depth=int(k.max())), 1e-9, PLAIN_S)
        policy.observe(DraftedRows(slice(0, 4), k, k, sample))
    assert costs.is_measured(drafts=True)
