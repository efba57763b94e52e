"""Traps that other engines fell into, each with a test that names it and fails when it is set.

Speculation that adapts, under continuous batching; `policies` is test_known_traps_of_policies.

    trap                                            where
     1 k = 0 starves the draft's KV                 here; test_drafter: acceptance_recovers
     2 k = 0 is not free                            here; test_executor: plain_steps_touch_neither
     3 accepted / k is a biased statistic           policies; test_lookahead, test_estimator
     4 k = 0 absorbs a slot, or everybody           policies; test_goodput_loop: useless_at_first
     5 a policy of acceptance alone ignores load    policies; test_goodput_loop: never_below
     6 one k for the batch, or padding to max k     here, policies
     7 a shared estimator lets tenants meddle       policies
     8 replicas that measure for themselves differ  policies; test_steplog: replay
     9 KV accounting that drifts                    here; test_scheduler_lookahead: unused_tail
    10 a slot whose index is wrong drafts garbage   here; test_drafter: same_in_every_slot

Flaws of verification (A1 to D1) are in test_known_flaws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import msgpack
from torch import Tensor

from cbatch.core import lookahead
from cbatch.core.committer import Committer
from cbatch.core.cost import CostProfile
from cbatch.core.planner import Planner
from cbatch.engine.steplog import encode_array
from cbatch.runtime.drafter import DraftModel, DraftRows, Proposal
from sim.models import ModelledAcceptance
from tests.helpers import World, make_config
from tests.helpers import make_request as make_modelled_request
from tests.runtime.engines import RecordingExecutor, make_request, run_engine
from tests.runtime.pairs import VOCAB, tiny_model

NOISE = 0.08  # of the draft's weights: about half of its drafts are accepted
HOPELESS = CostProfile((1, 1024), (2e-3, 100e-3), draft_pass_s=1.0)  # drafting never pays


def encode(value: object) -> bytes:
    return msgpack.encode(value, enc_hook=encode_array)


def prompts(count: int, seed: int = 1, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(4, high)).tolist() for _ in range(count)]


# --- 1, 2: steps without drafts -------------------------------------------------------------------


class _LeavesHoles(DraftModel):
    """Takes tokens for seen that were emitted while it did not draft."""

    def propose(self, rows: DraftRows) -> Proposal:
        begun = rows.slots[self.kv_len[rows.slots] > 0]
        self.kv_len[begun] = self.table.num_tokens[begun] - 1
        return super().propose(rows)


def acceptance_around_a_pause(drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Acceptance before and after 60 steps of k = 0 amid k = 3, in a run of the whole engine."""
    steps = {"n": 0}

    def choose(config: Any, estimate: Any, rows: Any, caps: np.ndarray) -> np.ndarray:
        steps["n"] += 1
        return np.minimum(caps, np.int32(0 if 12 <= steps["n"] < 72 else 3))

    target = tiny_model()
    executor = RecordingExecutor(
        target, drafter=drafter, num_blocks=256, block_size_tokens=4, max_slots=8
    )
    requests = [
        make_request(f"r{i}", prompt, max_tokens=130) for i, prompt in enumerate(prompts(8, high=9))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(lookahead, "choose_lookahead", choose)
        run = run_engine(requests, target, drafter.model, lookahead="fixed:3", executor=executor)
    assert run.outputs == run_engine(requests, tiny_model()).outputs
    drafted = [int(step.sum()) for step in executor.drafted]
    pause = drafted.index(0, 4)
    resumed = next(i for i in range(pause, len(drafted)) if drafted[i])
    assert resumed - pause >= 50
    found = []
    for part in (slice(0, pause), slice(resumed, resumed + 20)):
        k = np.concatenate(executor.drafted[part])
        accepted = np.concatenate(executor.accepted[part])
        found.append(float(accepted.sum() / (accepted + (accepted < k)).sum()))
    return found


def test_trap_1_after_k_was_zero_the_drafts_kv_has_no_holes(monkeypatch):
    """k 3 -> 0 -> 3: acceptance recovers, and collapses if the drafter does not catch up."""
    before, after = acceptance_around_a_pause(DraftModel(tiny_model(noise=NOISE)), monkeypatch)
    assert after > 0.75 * before > 0.2
    _, starved = acceptance_around_a_pause(_LeavesHoles(tiny_model(noise=NOISE)), monkeypatch)
    assert starved < 0.5 * after


class _NeverAsked(DraftModel):
    def propose(self, rows: DraftRows) -> Proposal:
        pytest.fail("the drafter was asked")


def plain_steps(policy: str, opts_out: bool, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every plan of a run in which nothing is drafted, as bytes: because each request `opts_out`,
    or because of what the policy finds."""
    plans: list[bytes] = []

    class Watched(RecordingExecutor):
        def run(self, plan: Any) -> Any:
            plans.append(encode(plan))
            return super().run(plan)

    params = {"max_tokens": 30, "max_lookahead": 0 if opts_out else None}
    requests = [make_request(f"r{i}", prompt, **params) for i, prompt in enumerate(prompts(6))]
    target = tiny_model()
    draft = None if policy == "off" else tiny_model(noise=NOISE)
    drafter = None if draft is None else _NeverAsked(draft)
    executor = Watched(target, drafter=drafter, num_blocks=256, block_size_tokens=4, max_slots=8)
    settings = {"cost_profile": HOPELESS} if policy == "goodput:4" else {}
    with monkeypatch.context() as patch:
        if policy == "ema:4":
            patch.setattr(lookahead, "choose_lookahead", lambda *args: args[-1] * 0)
        run_engine(requests, target, draft, lookahead=policy, executor=executor, **settings)
    return plans


@pytest.mark.parametrize("policy", ["fixed:4", "ema:4", "goodput:4"])
def test_trap_2_a_step_with_k_of_zero_for_everyone_is_a_plain_step(policy, monkeypatch):
    """The same plans to the byte as with lookahead off, blocks too; the drafter is never asked."""
    opts_out = policy == "fixed:4"
    plain = plain_steps("off", opts_out, monkeypatch)
    assert len(plain) >= 30
    assert plain_steps(policy, opts_out, monkeypatch) == plain
    grow = Planner._grow
    monkeypatch.setattr(Planner, "_grow", lambda self, d, reach: grow(self, d, reach + np.int32(4)))
    with pytest.raises(AssertionError):  # room for drafts is reserved though nobody drafts
        assert plain_steps(policy, opts_out, monkeypatch) == plain


# --- 6: mixed batches -----------------------------------------------------------------------------


def test_trap_6_rows_of_different_k_are_verified_in_one_pass_without_padding(monkeypatch):
    """The target computes 1 + k_i tokens for row i, no more; 1 + max k for each would show."""
    target, draft = tiny_model(), tiny_model(noise=NOISE)
    executor = RecordingExecutor(
        target, drafter=DraftModel(draft), num_blocks=256, block_size_tokens=4, max_slots=8
    )
    computed: list[tuple[int, int]] = []  # tokens, rows of logits
    forward = target.forward

    def count(batch: Any, kv: Any) -> Tensor:
        computed.append((len(batch.tokens), len(batch.logits_index)))
        return forward(batch, kv)

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


# --- 9, 10: blocks and slots ----------------------------------------------------------------------


def account_for_blocks() -> None:
    """Before each step every row has room for 1 + k, after it none has a block too many."""
    config = make_config(lookahead="fixed:8", block_size_tokens=2, num_blocks=256)
    world = World(config, acceptance=ModelledAcceptance(0.4))
    world.add(*(make_modelled_request(f"r{i}", 5 + i, seed=i, max_tokens=90) for i in range(6)))
    scheduler = world.scheduler
    table, pool = scheduler.state.table, scheduler.state.pool
    reserved = returned = 0
    while (plan := scheduler.plan(0.0)) is not None:
        decodes = plan.wants_logits
        slots, k = plan.slots[decodes], plan.num_drafts[decodes]
        free = pool.num_available
        assert (table.capacity[slots] >= table.num_tokens[slots] + k).all(), "reserved too little"
        result = world.executor.run(plan)
        scheduler.commit(result, 0.0)
        going = [owner.slot for owner in scheduler.state.owners if owner is not None]
        kept = np.maximum(table.num_tokens[going] - 1, table.floor[going])
        assert (table.capacity[going] - kept < 2).all(), "kept what was not used"
        reserved += int((k > 0).sum())
        returned += pool.num_available - free
    assert reserved > 100 and returned > 100
    assert pool.num_available == pool.num_blocks, "blocks have leaked"


def test_trap_9_reserved_for_the_most_and_committed_as_accepted(monkeypatch):
    """Blocks for 1 + k are there before each step, those beyond 1 + accepted are back after it, and
    nothing drifts."""
    account_for_blocks()
    grow = Planner._grow
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="too little"):
        patch.setattr(
            Planner, "_grow", lambda self, d, reach: grow(self, d, reach - d.drafts.num_drafts)
        )
        account_for_blocks()
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="not used"):
        patch.setattr(Committer, "_return_tails", lambda *_: None)
        patch.setattr(Committer, "_return_unused", lambda *_: None)
        account_for_blocks()


class _GarbageBeyondTheFirst(DraftModel):
    """Drafts as it should in slot 0 alone."""

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        tokens = (proposal.tokens + (rows.slots > 0)[:, None]) % VOCAB
        return proposal._replace(tokens=tokens)


def accepted_by_order(kind: type[DraftModel], order: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Drafted and accepted in every step of each request, and the slots that they got, if they
    enter in `order`."""
    requests = [
        make_request(f"r{i}", prompt, max_tokens=30 + 5 * i)
        for i, prompt in enumerate(prompts(6, seed=8))
    ]
    target, drafter = tiny_model(), kind(tiny_model(noise=NOISE))
    executor = RecordingExecutor(
        target, drafter=drafter, num_blocks=256, block_size_tokens=4, max_slots=8
    )
    run_engine(
        [requests[i] for i in order],
        target,
        drafter.model,
        lookahead="fixed:3",
        executor=executor,
        prefix_cache=False,
        step_budget_tokens=1024,
    )
    rows = {f"r{i}": executor.row_of_request[f"r{i}"] for i in range(6)}
    steps = {name: [row[1:] for row in rows[name]] for name in rows}
    return steps, [rows[name][0][0] for name in rows]


def test_trap_10_acceptance_is_the_same_in_every_slot():
    """Each request drafts and accepts step for step the same in whichever slot it lands."""
    orders = [0, 1, 2, 3, 4, 5], [3, 5, 0, 4, 2, 1]
    (steps, slots), (others, permuted) = (accepted_by_order(DraftModel, o) for o in orders)
    assert all(a != b for a, b in zip(slots, permuted, strict=True))
    assert steps == others
    assert sum(accepted for rows in steps.values() for _, accepted in rows) > 50
    broken = [accepted_by_order(_GarbageBeyondTheFirst, order)[0] for order in orders]
    assert broken[0] != broken[1]
