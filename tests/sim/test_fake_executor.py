"""The fake executor plans and prices as the checking one; acceptance models keep their laws.

Statistics are compared at 5 standard errors (one seed in 1.7 million); seeds are fixed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import sim.executor.acceptance
from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import SchedulerStats
from sim.executor.acceptance import (
    AcceptanceModel,
    BetaAcceptance,
    DriftingAcceptance,
    PositionAcceptance,
    RecordedAcceptance,
    parse_acceptance,
)
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


def config_of(lookahead: str) -> Any:
    return make_config(
        lookahead=lookahead, num_blocks=60, max_num_seqs=6, max_num_batched_tokens=40
    )


def checked(config: Any) -> SimExecutor:
    return SimExecutor.of(config, acceptance=ModelledAcceptance(ACCEPTANCE))


def fast(config: Any, cost: Any = None) -> FakeExecutor:
    return FakeExecutor(
        max_num_seqs=config.max_num_seqs,
        cost=cost or LinearCost(),
        acceptance=PositionAcceptance([ACCEPTANCE], max_num_seqs=config.max_num_seqs),
    )


@pytest.mark.parametrize("lookahead", ["off", "fixed:3", "ema:4", "adaptive:4"])
def test_same_plans_and_counts_as_the_checking_executor(lookahead: str) -> None:
    config = config_of(lookahead)
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
    config, cost = config_of(lookahead), Watching()
    plans, results, _ = serve(fast(config, cost), config)
    state: dict[int, list[int]] = {}  # by slot: known tokens, tokens in KV
    verified = 0
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
        assert work == expected
    assert (verified > 0) is (lookahead != "off")


def test_drafts_without_a_model_of_acceptance_are_refused() -> None:
    config = config_of("fixed:3")
    executor = FakeExecutor(max_num_seqs=config.max_num_seqs, cost=LinearCost())
    with pytest.raises(ValueError, match="acceptance"):
        serve(executor, config)


PROMPT_TOKENS = 10
SPECS = ("0.6", "positions:0.8,0.5,0.3", "beta:0.6,3", "drift:0.9,0.2,20", "recorded")
STANDARD_ERRORS = 5


def admission(slot: int, request: int, known_tokens: int = PROMPT_TOKENS) -> Any:
    return SimpleNamespace(
        slot=slot,
        request_id=str(request),
        seed=sim.executor.acceptance.mix(77, request),
        choice=0,
        num_prompt_tokens=PROMPT_TOKENS,
        tokens=np.zeros(known_tokens),
    )


def model_of(spec: str, max_num_seqs: int, folder: Path) -> AcceptanceModel:
    if spec == "recorded":
        path = folder / "fates.json"
        fates = np.random.default_rng(1).integers(0, 2, (7, 90)).tolist()
        path.write_text(json.dumps([row[: 60 + i] for i, row in enumerate(fates)]))
        spec = f"recorded:{path}"
    return parse_acceptance(spec, max_num_seqs=max_num_seqs)


def fates(model: AcceptanceModel, requests: int, tokens: int) -> np.ndarray:
    """Return the fates of a draft of depth 1 at every position of every request, bool [requests,
    tokens]."""
    slots = np.arange(requests)
    for slot in range(requests):
        model.admit(admission(slot, slot))
    one = np.ones(requests, np.int32)
    columns = [
        model.num_accepted(slots, PROMPT_TOKENS + 1 + t * one.astype(np.int64), one)
        for t in range(tokens)
    ]
    return np.stack(columns, axis=1).astype(bool)


def walk(
    model: AcceptanceModel, slot: int, request: int, ks: list[int], stop: int
) -> dict[int, bool]:
    """Return the fates of the positions that a request tries; it drafts `ks` in turn and is
    preempted every few steps."""
    fates: dict[int, bool] = {}
    position = PROMPT_TOKENS + 1
    for step in range(10_000):
        if position >= stop:
            break
        if step % 7 == 0:
            model.admit(admission(slot, request, position))
        k = ks[step % len(ks)]
        drafts = np.array([k], np.int32)
        (accepted,) = model.num_accepted(np.array([slot]), np.array([position]), drafts).tolist()
        fates |= dict.fromkeys(range(position, position + accepted), True)
        if accepted < k:
            fates[position + accepted] = False
        position += accepted + 1
    return fates


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("positions")])
def test_only_request_and_position_decide(spec: str, tmp_path: Path) -> None:
    """For any k, slot and preemptions, a position's fate is that of a draft of depth 1 there."""
    model = model_of(spec, 20, tmp_path)
    alone = fates(model, 20, 120)
    seen = set()
    for request in (0, 3, 6):
        for slot, ks in ((0, [1]), (5, [4]), (7, [3, 1, 6])):
            fate_by_position = walk(
                model_of(spec, 20, tmp_path), slot, request, ks, PROMPT_TOKENS + 100
            )
            for position, fate in fate_by_position.items():
                assert alone[request, position - PROMPT_TOKENS - 1] == fate
            seen.add(sum(fate_by_position.values()))
    assert len(seen) > 3  # drafting more does accept more
    assert not alone.all() and alone.any()


def within(value: float, expected: float, error: float) -> bool:
    return abs(value - expected) <= STANDARD_ERRORS * error


def test_constant_and_positions_have_their_chances() -> None:
    count = 40_000
    slots, drafts = np.arange(count), np.full(count, 4, np.int32)
    for chances in ([0.7], [0.8, 0.5, 0.25]):
        model = PositionAcceptance(chances, max_num_seqs=count)
        for slot in range(count):
            model.admit(admission(slot, slot))
        accepted = model.num_accepted(slots, np.full(count, 30), drafts)
        for depth in range(4):
            tried = accepted[accepted >= depth]
            chance = chances[min(depth, len(chances) - 1)]
            error = math.sqrt(chance * (1 - chance) / len(tried))
            assert within(float((tried > depth).mean()), chance, error)


def test_beta_differs_between_requests_by_its_law() -> None:
    mean, concentration, requests, tokens = 0.6, 3.0, 4000, 60
    shares = fates(
        BetaAcceptance(mean, concentration, max_num_seqs=requests), requests, tokens
    ).mean(axis=1)
    of_chance = mean * (1 - mean) / (1 + concentration)
    of_coins = mean * (1 - mean) * concentration / (1 + concentration) / tokens
    variance = of_chance + of_coins
    assert within(float(shares.mean()), mean, math.sqrt(variance / requests))
    # The fourth moment of a law on [0, 1] with this variance: at most 3 times its square here.
    assert within(float(shares.var()), variance, variance * math.sqrt(2 / requests))


@pytest.mark.parametrize("lag", [1, 20])
def test_drift_is_correlated_as_long_as_it_says(lag: int) -> None:
    """For fates x at p and p + lag: mean m = (high + low) / 2, covariance ((high - low) / 2)^2
    times (1 - 1 / tokens)^lag. Standard errors are over requests, which are independent."""
    high, low, dwell, requests, tokens = 0.9, 0.2, 20.0, 3000, 120
    outcomes = fates(DriftingAcceptance(high, low, dwell, max_num_seqs=requests), requests, tokens)
    centred = outcomes - (high + low) / 2
    products = (centred[:, :-lag] * centred[:, lag:]).mean(axis=1)
    error = float(products.std()) / math.sqrt(requests)
    expected = ((high - low) / 2) ** 2 * (1 - 1 / dwell) ** lag
    assert within(float(products.mean()), expected, error)
    level = outcomes.mean(axis=1)
    assert within(float(level.mean()), (high + low) / 2, float(level.std()) / math.sqrt(requests))


def test_recorded_sequences_are_replayed_and_begin_again() -> None:
    model = RecordedAcceptance([[1, 0, 1, 1], [0, 1]], max_num_seqs=3)
    for slot, request in enumerate((0, 1, 2)):
        model.admit(admission(slot, request))
    slots, k = np.arange(3), np.array([4, 4, 2], np.int32)
    at = np.full(3, PROMPT_TOKENS + 2)
    assert model.num_accepted(slots, at, k).tolist() == [3, 0, 2]
    assert model.num_accepted(slots, at + 1, k).tolist() == [2, 1, 2]


BAD = (
    "1.5 nan constant: beta:0.5 beta:1,3 beta:0.5,0 drift:0.9,0.1,0.5 positions: positions:0.5,x "
    "gamma:1 recorded:/nowhere/at/all"
)


@pytest.mark.parametrize("text", ["", *BAD.split()])
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        parse_acceptance(text, max_num_seqs=1)


def test_recordings_contain_only_zeros_and_ones(tmp_path: Path) -> None:
    path = tmp_path / "fates.json"
    for bad in ("[]", "[[]]", "[[2]]", "{}", "[[1"):
        path.write_text(bad)
        with pytest.raises(FieldError):
            parse_acceptance(f"recorded:{path}", max_num_seqs=1)
    with pytest.raises(FieldError, match="request_id"):
        RecordedAcceptance([[1]], max_num_seqs=1).admit(
            SimpleNamespace(slot=0, request_id="x", num_prompt_tokens=1)  # type: ignore[arg-type]
        )
