"""Traps of adaptive speculation under continuous batching that other engines fell into. Each has a
test that names it and fails when it is planted.

    trap                                            where
     1 k = 0 starves the draft's KV                 core/test_scheduler_lookahead: comes_back
     2 k = 0 is not free                            runtime/test_executor: plain_steps
     3 accepted / k is a biased statistic           core/test_acceptance
     4 k = 0 absorbs a slot, or all                 here; core/test_adaptive_policy: gets_some_again
     5 a policy of acceptance alone ignores load    core/test_adaptive_policy: never_below
     6 one k for the batch, or padding to max k     here
     7 a shared estimator lets tenants interfere    here
     8 replicas that measure for themselves differ  steplog: replay
     9 KV accounting that drifts                    check_scheduler, after every step of a test
    10 a slot whose index is wrong drafts garbage   runtime/test_drafter: same_in_every_slot

Flaws of verification (A1 to D1) are in runtime/test_statistics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.speculation.acceptance import OverallAcceptance
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.build import build_policy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from tests.checking.models import ModelledAcceptance
from tests.helpers import DraftedRows, RowsToPlan, World, decoding, make_config
from tests.helpers import make_request as modelled_request
from tests.runtime.engines import VOCAB, RecordingExecutor, make_request, run_engine, tiny_model

NOISE = 0.08  # of the draft's weights: about half of its drafts are accepted
K = 6
ADAPTIVE = LookaheadConfig(policy="adaptive", k=K)
# Costs of the simulator's executor (`sim.cost.base.LinearCost`).
PROFILE = CostProfile(2e-3, 1e-4, draft_pass_s=2e-4, draft_token_s=1e-5)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, rng.integers(4, 40)).tolist() for _ in range(count)]


def make_world(acceptance: dict[str, float], **settings: Any) -> World:
    """Return a world with room for all requests, whose acceptance may be changed while it runs. All
    are greedy: only counts of their acceptance are known."""
    roomy = {
        "num_blocks": 2048,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_model_len": 8192,
        "draft_context_tokens": 8192,
        "max_num_batched_tokens": 1024,
        "lookahead": ADAPTIVE,
        "cost_profile": PROFILE,
    }
    world = World(make_config(**(roomy | settings)), acceptance=ModelledAcceptance(0.7, acceptance))
    for i, name in enumerate(acceptance):
        world.add(modelled_request(name, 8, seed=i, max_tokens=7000, temperature=0.0))
    return world


def drafts_of(world: World) -> dict[str, int]:
    """Run one step; return k of each row that decoded."""
    commit = world.loop.step()
    assert commit is not None
    return {row.request_id: row.num_drafted for row in commit.updates()}


def believed(world: World, name: str) -> float:
    state = world.scheduler.state
    beliefs = state.policy.estimated_acceptance(np.array([state.sequences[name].slot]))
    assert beliefs is not None
    return beliefs[0]


# --- 4: k of zero --------------------------------------------------------------------------------


def steps_until_all_draft_again(limit: int) -> int | None:
    """Return the steps until all rows draft again, with a drafter that is hopeless until
    speculation is off, and good from then on."""
    acceptance = dict.fromkeys("abcd", 0.03)
    world = make_world(acceptance)
    policy = world.scheduler.state.policy
    while policy.stats is None or policy.stats.drafting:
        world.loop.step()
    acceptance.update(dict.fromkeys("abcd", 0.95))
    for step in range(limit):
        if min(drafts_of(world).values()) >= 3:
            return step
    return None


def test_trap_4_k_of_zero_does_not_absorb_the_engine(monkeypatch):
    """A probe notices it; without probes speculation stays off."""
    back = steps_until_all_draft_again(2000)
    assert back is not None and back > 20
    monkeypatch.setattr(AdaptivePolicy, "_single_draft", lambda *_: None)
    assert steps_until_all_draft_again(2000) is None


# --- 6: mixed batches -----------------------------------------------------------------------------


def test_trap_6_easy_and_hard_rows_of_one_step_get_different_k():
    easy, hard = dict.fromkeys("abcdef", 0.96), dict.fromkeys("xy", 0.2)
    world = make_world(easy | hard)
    for _ in range(30):
        world.step()
    seen = [drafts_of(world) for _ in range(60)]
    apart = [min(k[name] for name in easy) - max(k[name] for name in hard) for k in seen]
    assert np.mean(np.array(apart) >= 2) > 0.8, apart  # 3 to 5 drafts are equally good to 3 %


def test_trap_6_rows_of_different_k_are_verified_in_one_pass_without_padding(monkeypatch):
    """The target computes 1 + k_i tokens for row i, no more; 1 + max k for each would be
    noticed."""
    target, draft = tiny_model(), tiny_model(noise=NOISE)
    executor = RecordingExecutor(
        target, drafter=DraftModel(draft), num_blocks=256, block_size=4, max_num_seqs=8
    )
    computed: list[tuple[int, int]] = []  # tokens, rows of logits
    forward = target.forward

    def count(batch: Any, *others: Any) -> Tensor:
        computed.append((len(batch.tokens), len(batch.logits_index)))
        return forward(batch, *others)

    monkeypatch.setattr(target, "forward", count)
    requests = [
        make_request(f"r{i}", prompt, max_tokens=40, max_lookahead=(0, 1, 2, 6)[i % 4])
        for i, prompt in enumerate(prompts(8))
    ]
    run_engine(requests, target, draft, lookahead="ema:6", executor=executor)
    assert len(computed) == len(executor.drafted), "one pass a step"
    ragged = 0
    for step, ((tokens, logits), drafted) in enumerate(
        zip(computed, executor.drafted, strict=True)
    ):
        needed, padded = len(drafted) + drafted.sum(), len(drafted) * (1 + drafted.max(initial=0))
        assert logits == needed
        assert tokens == needed or step < 2, "only prompts compute more"
        ragged += len(np.unique(drafted)) >= 3 and padded > 1.5 * needed
    assert ragged >= 10


# --- 7: inputs of k --------------------------------------------------------------------------


def estimates_with_others(policy: str, accepted_by_others: int) -> list[float]:
    """Return the estimates of four rows, of which the first accepts 4 of 6 in every step."""
    config = LookaheadConfig(policy=policy, k=K)
    lookahead = build_policy(config, PolicyLimits(4, 64))
    for slot in range(4):
        lookahead.enter(slot, None)
    drafted = np.full(4, K, np.int32)
    accepted = np.array([4] + [accepted_by_others] * 3, np.int32)
    cost = StepSample(decoding(4, depth=K), 1e-3, 1e-2)
    for _ in range(32):
        lookahead.choose(RowsToPlan(slice(0, 4), drafted))
        lookahead.observe(DraftedRows(slice(0, 4), drafted, accepted, cost))
    beliefs = lookahead.estimated_acceptance(np.arange(4))
    assert beliefs is not None
    return beliefs


@pytest.mark.parametrize("policy", ["ema", "adaptive"])
def test_trap_7_what_is_believed_of_a_request_is_its_own(policy):
    """Other tenants' acceptance does not enter. (The prior of a newcomer and the price of a token
    are shared on purpose.)"""
    (mine, *bad), (same, *good) = estimates_with_others(policy, 0), estimates_with_others(policy, K)
    assert mine == pytest.approx(same, abs=1e-3) and max(bad) < 0.2 < mine < 0.9 < min(good)


def first_k_after(acceptance: float) -> tuple[float, int]:
    """Return a newcomer's estimated acceptance and its first k, after 40 short requests."""
    names = [f"r{i}" for i in range(40)]
    world = make_world({})
    world.executor.acceptance = ModelledAcceptance(acceptance)
    for i in range(0, 40, 4):
        world.add(*(modelled_request(name, 8, max_tokens=24) for name in names[i : i + 4]))
        while world.scheduler.has_work:
            world.step()
    world.add(modelled_request("new", 8, max_tokens=100))
    world.step()
    return believed(world, "new"), drafts_of(world)["new"]


def test_trap_7_a_short_request_starts_from_the_fleets_prior(monkeypatch):
    """It would end before an estimate of its own is known."""
    belief, k = first_k_after(0.95)
    assert belief > 0.85 and k >= 4
    belief, k = first_k_after(0.05)
    assert belief < 0.2 and k <= 1
    monkeypatch.setattr(OverallAcceptance, "observe", lambda *_: None)
    assert [round(first_k_after(a)[0], 6) for a in (0.95, 0.05)] == [0.7, 0.7]
