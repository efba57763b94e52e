"""Snapshots have correct, bounded data at a limited rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch import SamplingParams
from cbatch.engine.engine import Engine
from cbatch.process import monitor as monitor_module
from cbatch.process.messages import StepSnapshot
from cbatch.process.monitor import MAX_PERIOD_S, MAX_SHARE, MAX_STEPS, MIN_PERIOD_S, Monitor
from tests.toy_engine import make_engine


def step(engine: Engine, monitor: Monitor) -> Any:
    """Run one step, pass it to the monitor, and return the commit."""
    commit = engine.core.loop.step()
    assert commit is not None
    assert engine.core.loop.last is not None
    monitor.on_commit(*engine.core.loop.last)
    return commit


def busy(**options: Any) -> tuple[Engine, Monitor]:
    engine = make_engine(**({"lookahead": "ema:4", "max_num_seqs": 4} | options))
    for number in range(4):
        params = SamplingParams(max_tokens=60, seed=number, ignore_eos=True)
        engine.add([5, 6, 7, 8 + number], params)
    return engine, Monitor(engine.scheduler)


def test_snapshots_have_the_steps_unchanged() -> None:
    """The executor may use its arrays again after a step."""
    engine, monitor = busy()
    totals = engine.scheduler.stats
    shown: list[StepSnapshot] = []
    while engine.scheduler.has_work:
        step(engine, monitor)
        assert engine.core.loop.last is not None
        engine.core.loop.last[1].num_accepted[:] = 99
        steps, number = monitor.take_steps()
        assert number == len(steps) == 1
        shown += steps
    assert len(shown) == totals.steps
    assert sum(sum(each.drafted) for each in shown) == totals.drafted_tokens > 50
    assert sum(sum(each.accepted) for each in shown) == totals.accepted_tokens > 20
    first, *others = shown
    assert first.slots == [0, 1, 2, 3] and first.chunk == [4] * 4 and not any(first.drafted)
    assert all(set(each.chunk) == {1} for each in others)


@pytest.mark.parametrize("lookahead", ["ema:4", "off", "fixed:3"])
def test_snapshots_have_the_running_requests(lookahead: str) -> None:
    engine, monitor = busy(lookahead=lookahead)
    for _ in range(6):
        step(engine, monitor)
    state = engine.scheduler.state
    rows = monitor.rows()
    assert [row.slot for row in rows] == [0, 1, 2, 3]
    for row in rows:
        owner = state.owners[row.slot]
        assert owner is not None and row.request_id == owner.request.request_id
        tokens = (row.prompt_tokens, row.tokens, row.num_uncomputed_tokens)
        assert tokens == (4, state.table.num_tokens[row.slot], 1)
        estimate = state.policy.estimated_acceptance(np.array([row.slot]))
        shown = [None] if lookahead != "ema:4" else [round(each, 3) for each in estimate]
        assert [row.estimated_acceptance] == shown


def test_snapshots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "MAX_ROWS", 3)
    monkeypatch.setattr(monitor_module, "MAX_CELLS", 5)
    engine, monitor = busy()
    for _ in range(MAX_STEPS + 7):
        last = step(engine, monitor)
    steps, num_steps = monitor.take_steps()
    assert num_steps == MAX_STEPS + 7 and len(steps) == MAX_STEPS
    assert steps[-1].drafted == last.num_drafted[:3].tolist()  # the latest ones
    assert all(len(each.slots) == 3 for each in steps) and len(monitor.rows()) == 3
    assert len(monitor.blocks().used) <= 5
    assert monitor.take_steps() == ((), 0)


def test_rows_that_ended_before_the_commit_are_not_shown() -> None:
    """With overlap, a request that ends while the next step runs has a row in that step, which must
    not count."""
    engine, monitor = busy()
    result_rows = step(engine, monitor)
    monitor.take_steps()
    assert engine.core.loop.last is not None
    plan, result, _ = engine.core.loop.last
    fewer = structs.replace(result_rows, owners=result_rows.owners[:-1])
    monitor.on_commit(plan, result, fewer)
    assert monitor.take_steps() == ((), 1)


def test_snapshots_are_due_ten_times_a_second_or_less_often_if_slow() -> None:
    monitor = Monitor(make_engine().scheduler)
    times_s = np.arange(0.0, 5.0, 0.003)
    for took_s, period_s in (
        (0.0, MIN_PERIOD_S),
        (0.002, 0.002 / MAX_SHARE),
        (0.02, MAX_PERIOD_S),
    ):
        due = []
        for now_s in times_s:
            if monitor.due(now_s):
                due.append(now_s)
                monitor.on_sent(now_s, took_s)
        gaps_s = np.diff(due)
        assert gaps_s.min() >= period_s - 1e-9 and gaps_s.max() < period_s + 0.004
        monitor = Monitor(make_engine().scheduler)
