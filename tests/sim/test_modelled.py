"""The fast executor decides and costs the same as the checking one: the scheduler makes the same
plans with either."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core.prices.step_work import StepWork
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import SchedulerStats
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from tests.checking.cost import LinearCost
from tests.checking.executor import SimExecutor
from tests.checking.invariants import check_scheduler
from tests.checking.models import ModelledAcceptance
from tests.helpers import make_config, make_request

ACCEPTANCE = 0.6


def requests() -> list[Any]:
    """Return prompts of many lengths that share their beginning, enough to overflow the pool."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, 1000, 12).tolist()
    made = []
    for i in range(40):
        own = rng.integers(0, 1000, int(rng.integers(1, 50))).tolist()
        prompt = common[: int(rng.integers(0, 13))] + own
        output = int(rng.integers(1, 40))
        # Greedy: the checking executor reports more than counts for rows that reject at random.
        params = {"max_tokens": output, "ignore_eos": True, "temperature": 0.0}
        made.append(make_request(f"r{i}", prompt, seed=i, **params))
    return made


def serve(executor: Any, config: Any) -> tuple[list[StepPlan], list[StepResult], Scheduler]:
    """Add five requests every few steps, then run until all have ended."""
    scheduler = Scheduler(config)
    plans, results, waiting = [], [], requests()
    now_s = 0.0
    for step in range(3000):
        if step % 8 == 0:
            for request in waiting[:5]:
                scheduler.add(request, now_s)
            waiting = waiting[5:]
        plan = scheduler.schedule(now_s)
        if plan is None:
            if not waiting:
                break
            continue
        plans.append(plan)
        results.append(executor.run(plan))
        now_s += results[-1].draft_s + results[-1].target_s
        scheduler.update_from_output(results[-1], now_s)
        check_scheduler(scheduler)
    assert not scheduler.has_work
    return plans, results, scheduler


def columns(plan: StepPlan) -> list[Any]:
    arrays = (plan.slots, plan.query_lens, plan.num_drafts, plan.catch_up, plan.wants_logits)
    admitted = [(a.request_id, a.slot, a.kv_len_tokens) for a in plan.deltas.new_sequences]
    return [*(array.tolist() for array in arrays), admitted]


def counts(stats: SchedulerStats) -> SchedulerStats:
    return structs.replace(stats, draft_s=0.0, target_s=0.0)


def config_for(lookahead: str) -> Any:
    return make_config(
        lookahead=lookahead, num_blocks=60, max_num_seqs=6, max_num_batched_tokens=40
    )


def checked(config: Any) -> SimExecutor:
    return SimExecutor(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=config.vocab_size,
        acceptance=ModelledAcceptance(ACCEPTANCE),
        draft_context_tokens=config.draft_context_tokens,
        drafter=config.default_chain,
    )


def fast(config: Any, cost: Any = None) -> FakeExecutor:
    return FakeExecutor(
        max_num_seqs=config.max_num_seqs,
        cost=cost or LinearCost(),
        acceptance=PositionAcceptance([ACCEPTANCE], max_num_seqs=config.max_num_seqs),
    )


@pytest.mark.parametrize("lookahead", ["off", "fixed:3", "ema:4", "adaptive:4"])
def test_same_plans_and_counts_as_the_checking_executor(lookahead: str) -> None:
    config = config_for(lookahead)
    checked_plans, their_results, their_scheduler = serve(checked(config), config)
    fast_plans, our_results, scheduler = serve(fast(config), config)
    assert [columns(p) for p in fast_plans] == [columns(p) for p in checked_plans]
    for one, other in zip(our_results, their_results, strict=True):
        assert one.row_splits.tolist() == other.row_splits.tolist()
        assert one.num_drafted.tolist() == other.num_drafted.tolist()
        assert one.num_accepted.tolist() == other.num_accepted.tolist()
    # It happened: preemptions, prefix hits, and both verdicts if any row drafts.
    stats = scheduler.stats
    assert counts(stats) == counts(their_scheduler.stats)
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    if lookahead != "off":
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_durations_are_those_of_the_checking_executor() -> None:
    """Their formulas are the same except for the cost of a draft that was not planned as one."""
    config = config_for("off")
    _, checked_results, _ = serve(checked(config), config)
    _, fast_results, _ = serve(fast(config), config)
    for one, other in zip(fast_results, checked_results, strict=True):
        assert one.target_s == pytest.approx(other.target_s, rel=1e-9)


class Watching:
    """A cost model that records its calls."""

    def __init__(self) -> None:
        self.works: list[dict[str, int]] = []

    def step_s(self, work: StepWork) -> tuple[float, float]:
        self.works.append({name: getattr(work, name) for name in work.__struct_fields__})
        return 0.0, 0.01, 0.0


@pytest.mark.parametrize("lookahead", ["off", "fixed:3"])
def test_composition_of_a_step(lookahead: str) -> None:
    """The composition is recomputed row by row from the plans: verification is charged at k + 1,
    whatever it yields."""
    config, cost = config_for(lookahead), Watching()
    plans, results, _ = serve(fast(config, cost), config)
    state: dict[int, list[int]] = {}  # by slot: known tokens, tokens in KV
    verified = since_prefill = 0
    for plan, result, work in zip(plans, results, cost.works, strict=True):
        for a in plan.deltas.new_sequences:
            state[a.slot] = [len(a.tokens), a.kv_len_tokens]
        expected = dict.fromkeys(work, 0)
        expected |= {"rows": plan.num_rows, "admitted": len(plan.deltas.new_sequences)}
        expected["draft_depth"] = int(plan.num_drafts.max())
        contexts: list[int] = []
        for i, slot in enumerate(plan.slots.tolist()):
            known, kv_len = state[slot]
            query, drafts = int(plan.query_lens[i]), int(plan.num_drafts[i])
            kind = "decode" if known - kv_len == 1 else "prefill"
            expected["decode_rows"] += kind == "decode"
            expected["target_tokens"] += query
            expected["context_tokens"] += kv_len + query
            if kind == "prefill":
                expected["prefill_tokens"] += query
                expected["prefill_context_tokens"] += kv_len + query
            if kind == "decode":
                contexts.append(kv_len + query)
            expected[f"{kind}_pairs"] += sum(kv_len + q + 1 for q in range(query))
            expected["logit_tokens"] += int(plan.wants_logits[i]) + drafts
            expected["draft_tokens"] += drafts
            expected["draft_context_tokens"] += kv_len if drafts else 0
            expected["ingested_tokens"] += int(plan.catch_up[i])
            verified += drafts
            emitted = int(result.row_splits[i + 1] - result.row_splits[i])
            accepted = int(result.num_accepted[i])
            state[slot] = [known + emitted, kv_len + query - drafts + accepted]
        expected["decode_longest_tokens"] = max(contexts, default=0)
        expected["decode_shortest_tokens"] = min(contexts, default=0)
        since_prefill = 0 if expected["prefill_tokens"] else since_prefill + 1
        expected["steps_since_prefill"] = since_prefill
        assert work == expected
    assert (verified > 0) is (lookahead != "off")


def test_drafts_without_a_model_of_acceptance_are_refused() -> None:
    config = config_for("fixed:3")
    executor = FakeExecutor(max_num_seqs=config.max_num_seqs, cost=LinearCost())
    with pytest.raises(ValueError, match="acceptance"):
        serve(executor, config)
