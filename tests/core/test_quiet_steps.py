"""A plan of many steps is as many plans: random loads are served once with as many steps in a plan
as are certain to be alike, once step by step, and whatever either decided is compared."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from cbatch.core import planner
from cbatch.core.config import LookaheadConfig, SchedulerConfig
from cbatch.core.events import Committed, Event, Planned
from cbatch.core.plan import QuietSteps, StepPlan, StepResult
from cbatch.core.planner import Planner
from cbatch.core.pool import BlockPool
from cbatch.core.request import Request
from cbatch.core.scheduler import Scheduler
from cbatch.engine.steplog import encode_array, replay
from sim.acceptance import BernoulliAcceptance
from sim.costs import ConstantCost
from sim.modelled import ModelledExecutor
from tests.helpers import make_request

HAPPENED: Counter[str] = Counter()  # over all examples
STEP_S = 0.25  # sums of it are exact


class Load(msgspec.Struct):
    """What comes from outside: requests and cancellations, by the time they come."""

    config: SchedulerConfig
    most_steps: int  # in one plan
    arrivals: list[tuple[float, Request]]
    cancels: list[tuple[float, str]]


@st.composite
def loads(draw: Any) -> Load:
    size = draw(st.integers(1, 16))
    policy = draw(st.sampled_from(["off"] * 9 + ["fixed", "ema", "goodput"]))
    stops = draw(st.sampled_from([{}, {}, {}, {"stop_token_ids": (120,)}]))
    slots = draw(st.integers(1, 5))
    config = SchedulerConfig(
        num_blocks=draw(st.integers(-(-48 // size), -(-200 // size))),
        block_size_tokens=size,
        max_slots=slots,
        max_model_tokens=96,
        step_budget_tokens=draw(st.integers(slots, 40)),
        prefix_cache=draw(st.sampled_from([True, True, False])),
        decode_reserve_tokens=draw(st.integers(1, 8)),
        draft_context_tokens=draw(st.sampled_from([None, 40])) if policy == "off" else 96,
        lookahead=LookaheadConfig(policy=policy, k=3),
    )
    arrivals, cancels = [], []
    for i in range(draw(st.integers(1, 12))):
        at_s = STEP_S * draw(st.integers(0, 200))
        first = 100 * draw(st.integers(0, 2))  # its output goes on in the same numbering
        prompt = range(first, first + draw(st.integers(1, 40)))
        more: dict[str, Any] = draw(st.sampled_from([{}, stops]))
        if policy != "off" and draw(st.booleans()):
            more = more | {"max_lookahead": 0}
        most = draw(st.integers(1, 60))
        request = make_request(f"r{i}", prompt, seed=i, max_tokens=most, temperature=0.0, **more)
        arrivals.append((at_s, request))
        if draw(st.integers(0, 4)) == 0:
            cancels.append((at_s + STEP_S * draw(st.integers(1, 50)), f"r{i}"))
    return Load(config, draw(st.sampled_from([2, 5, 1000])), arrivals, cancels)


class Served:
    """A load that was served, and all that was decided on the way."""

    def __init__(self, load: Load, *, many: bool) -> None:
        self.events: list[Event] = []
        self.states: list[Any] = []  # at every moment when something came from outside
        self.plans: list[StepPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: list[Any] = []
        self.scheduler = Scheduler(load.config, self.events.append)
        self.executor = ModelledExecutor(
            max_slots=load.config.max_slots,
            cost=ConstantCost(step_duration_s=STEP_S, draft_pass_s=STEP_S / 4),
            acceptance=BernoulliAcceptance(0.6, max_slots=load.config.max_slots),
        )
        self._run(load, load.most_steps if many else 1)

    def _run(self, load: Load, most_steps: int) -> None:
        scheduler, now_s = self.scheduler, 0.0
        coming = sorted([*load.arrivals, *load.cancels], key=lambda event: event[0])
        while scheduler.has_work or coming:
            self._apply(coming, now_s)
            next_s = coming[0][0] if coming else None
            quiet = scheduler.quiet_steps() if most_steps > 1 else None
            ends_s: list[float] = []
            if quiet is not None:
                quiet = QuietSteps(quiet.slots, min(quiet.num_steps, most_steps))
                ends_s = self.executor.foresee(quiet, now_s, next_s)
            before = scheduler.state.pool.num_cached
            plan = scheduler.plan(now_s, len(ends_s) or 1)
            if plan is None:
                if next_s is None:
                    break
                now_s = next_s
                continue
            if plan.num_steps > 1:
                HAPPENED["steps in plans of many"] += plan.num_steps
                HAPPENED["blocks in them"] += len(plan.deltas.append_blocks)
                HAPPENED["evictions in them"] += scheduler.state.pool.num_cached < before
            result = self.executor.run(plan)
            now_s = ends_s[-1] if ends_s else now_s + result.draft_s + result.target_s
            self._commit(plan, result, now_s)

    def _apply(self, coming: list[Any], now_s: float) -> None:
        scheduler, came = self.scheduler, False
        while coming and coming[0][0] <= now_s:
            at_s, what = coming.pop(0)
            came = True
            if isinstance(what, str):
                HAPPENED["cancels"] += scheduler.cancel(what, at_s)
            elif len(what.prompt) < scheduler.config.max_sequence_tokens:
                scheduler.add(what, at_s)
        if came:
            self.ended += [(end, now_s) for end in scheduler.take_finished()]
            self.states.append((now_s, state_of(scheduler)))

    def _commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        commit = self.scheduler.commit(result, now_s)
        self.scheduler.check()
        self.plans.append(plan)
        for name, tokens, _, _ in commit.updates():
            self.tokens.setdefault(name, []).extend(tokens.tolist())
        self.ended += [(end, now_s) for end in commit.finished]

    def told(self) -> bytes:
        """Everything, as if each step had been planned by itself."""
        stats = self.scheduler.stats
        HAPPENED["preemptions"] += stats.preemptions
        HAPPENED["prefix hits"] += stats.prefix_hit_tokens
        HAPPENED["drafts"] += stats.drafted_tokens
        appended = [
            triple
            for plan in self.plans
            for triple in zip(*(a.tolist() for a in appended_by(plan)), strict=True)
        ]
        others = [
            (plan.deltas.reset, plan.deltas.released, plan.deltas.zeroed_blocks, a)
            for plan in self.plans
            for a in [plan.deltas.admitted]
            if a or len(plan.deltas.released)
        ]
        events = list(expand(self.events))
        steps = [row for plan in self.plans for row in rows_of(plan)]
        final = state_of(self.scheduler)
        everything = events, steps, appended, others, self.tokens, self.ended, self.states, final
        return msgspec.msgpack.encode(everything, enc_hook=encode_array)


def appended_by(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    deltas = plan.deltas
    return deltas.append_slots, deltas.append_indices, deltas.append_blocks


def rows_of(plan: StepPlan) -> list[Any]:
    """Each step of the plan."""
    columns = (plan.slots, plan.generations, plan.query_lens, plan.num_drafts, plan.catch_up)
    lists = [column.tolist() for column in (*columns, plan.wants_logits)]
    return [(plan.step_id + i, lists) for i in range(plan.num_steps)]


def state_of(scheduler: Scheduler) -> Any:
    """All of slots and pool that later decisions may depend on."""
    state = scheduler.state
    table, pool = state.table, state.pool
    rows = [
        (
            *(int(column[slot]) for column in (table.num_tokens, table.todo, table.capacity)),
            (int(table.draft_lag[slot]), int(table.published[slot]), int(table.generation[slot])),
            (state.block_row(slot).tolist(), table.token_row(slot).tolist()),
            table.estimate[:, slot].tolist(),
        )
        for slot in sorted([*state.decoding, *state.prefilling])
    ]
    nodes = pool._uids, pool._names[pool._uids > 0]
    blocks = pool._free, pool._cached.check(), nodes, pool.ref_counts, pool._ready
    return rows, blocks, structs.asdict(scheduler.stats)


def expand(events: list[Event]) -> Any:
    """The log that single steps would have left."""
    num_steps, began_s = 1, 0.0
    for event in events:
        if isinstance(event, Planned) and event.num_steps > 1:
            num_steps, began_s = event.num_steps, event.now_s
            continue
        if not (isinstance(event, Committed) and num_steps > 1):
            yield event
            continue
        result, rows = event.result, len(event.result.generations)
        for i in range(num_steps):
            yield Planned(began_s + i * STEP_S)
            one = structs.replace(
                result,
                step_id=result.step_id + i,
                tokens=result.tokens.reshape(rows, num_steps)[:, i],
                row_splits=result.row_splits // num_steps,
                target_s=result.target_s / num_steps,
            )
            yield Committed(one, began_s + (i + 1) * STEP_S)
        num_steps = 1


def check_alike(load: Load) -> int:
    """Returns how many steps there were."""
    many, single = Served(load, many=True), Served(load, many=False)
    assert many.told() == single.told()
    assert sum(plan.num_steps for plan in many.plans) == len(single.plans)
    return len(single.plans)


@settings(
    max_examples=70,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(load=loads())
def test_many_steps_in_a_plan_are_as_many_plans(load: Load) -> None:
    HAPPENED["steps"] += check_alike(load)


def test_everything_happened() -> None:
    if not HAPPENED:
        pytest.skip("no load was served")
    assert HAPPENED["steps in plans of many"] > 0.25 * HAPPENED["steps"] > 500
    for what in (
        "blocks in them",
        "evictions in them",
        "preemptions",
        "prefix hits",
        "cancels",
        "drafts",
    ):
        assert HAPPENED[what] > 20, what


def busy(size: int = 4, **more: Any) -> Load:
    """Three rows that decode for long, in a pool of which most is cached and used again."""
    config = SchedulerConfig(
        num_blocks=240 // size, block_size_tokens=size, max_slots=3, max_model_tokens=96, **more
    )
    arrivals = [
        (STEP_S * 12 * i, make_request(f"r{i}", range(100 * i, 100 * i + 9 + i), max_tokens=40 + i))
        for i in range(9)
    ]
    return Load(config, 1000, arrivals, [])


def test_breaches_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: blocks by row instead of by step, a step too many, the newest
    of evicted blocks first."""
    quiet_steps = Planner.quiet_steps

    def by_row(slots: np.ndarray, spare: np.ndarray, num_steps: int, size: int) -> list[int]:
        return sorted(in_turn(slots, spare, num_steps, size))

    def too_long(self: Planner) -> QuietSteps | None:
        quiet = quiet_steps(self)
        return quiet and QuietSteps(quiet.slots, quiet.num_steps + 1)

    def evict_newest(self: BlockPool, count: int) -> np.ndarray:
        return evict(self, count)[::-1]

    in_turn, evict = planner.in_turn, BlockPool._evict
    check_alike(busy())
    for owner, name, broken in (
        (planner, "in_turn", by_row),
        (Planner, "quiet_steps", too_long),
        (BlockPool, "_evict", evict_newest),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(AssertionError):
                check_alike(busy())


def test_more_steps_than_are_certain_are_refused() -> None:
    scheduler = Scheduler(busy().config)
    assert scheduler.quiet_steps() is None
    with pytest.raises(ValueError, match="num_steps: 2"):
        scheduler.plan(0.0, 2)
    scheduler.add(make_request("r", 5, max_tokens=8), 0.0)
    assert scheduler.quiet_steps() is None, "its prompt comes first"
    executor = ModelledExecutor(max_slots=3, cost=ConstantCost())
    plan = scheduler.plan(0.0)
    assert plan is not None and scheduler.quiet_steps() is None, "a plan is in flight"
    scheduler.commit(executor.run(plan), 0.0)
    quiet = scheduler.quiet_steps()
    assert quiet is not None and (quiet.slots.tolist(), quiet.num_steps) == ([0], 7)
    with pytest.raises(ValueError, match="num_steps: 8"):
        scheduler.plan(0.0, 8)
    plan = scheduler.plan(0.0, 7)
    assert plan is not None
    with pytest.raises(ValueError, match="num_steps: 7"):
        plan.require_one_step()
    executor.foresee(quiet, 0.0, None)
    commit = scheduler.commit(executor.run(plan), 1.0)
    assert [len(end.output) for end in commit.finished] == [8] and commit.counts.tolist() == [7]


def test_a_log_with_such_plans_replays() -> None:
    served = Served(busy(), many=True)
    plans: list[StepPlan | None] = []
    scheduler = replay(served.events, on_plan=plans.append)
    assert [plan.num_steps for plan in plans if plan] == [p.num_steps for p in served.plans]
    assert max(plan.num_steps for plan in served.plans) > 10
    found, expected = state_of(scheduler), state_of(served.scheduler)
    assert msgspec.msgpack.encode(found, enc_hook=encode_array) == msgspec.msgpack.encode(
        expected, enc_hook=encode_array
    )
