"""Replays that take quiet steps in one plan tell, byte for byte, what single steps tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cbatch.core.events import Event
from cbatch.core.plan import QuietSteps, StepPlan
from cbatch.core.scheduler import Scheduler
from cbatch.engine.steplog import encode_array
from sim.arrivals import poisson
from sim.costs import ConstantCost, LinearCost
from sim.lengths import fixed, uniform
from sim.modelled import ModelledExecutor
from sim.replay import Progress, replay
from sim.report import Record, to_json
from sim.roofline import Roofline, RooflineConfig, load_gpu, load_shape
from sim.sources import ClosedLoop, OpenLoop, Source
from sim.timeline import Timeline
from sim.workload import Conversations, converse, generate
from tests.sim.replays import config_for, executor_for, speculating


def traced(rate: float) -> Any:
    lengths = uniform(1, 300), uniform(1, 90)
    return generate(lambda rng: poisson(rate, rng), *lengths, requests=60, seed=1)


def conversations() -> Any:
    made = Conversations(
        turns=fixed(3), think_s=0.5, messages=uniform(20, 60), outputs=uniform(9, 60)
    )
    return converse(lambda rng: poisson(8.0, rng), made, sessions=20, seed=2)


ROOFLINE = Roofline(RooflineConfig(gpu=load_gpu("L4"), shape=load_shape("llama-3.1-8b")))
LOADS: dict[str, tuple[Callable[[], Source], Any, dict[str, Any]]] = {
    "light": (lambda: OpenLoop(traced(2.0)), ROOFLINE, {}),
    "busy": (lambda: OpenLoop(traced(8.0)), LinearCost(), {}),
    "closed loop": (lambda: ClosedLoop(traced(1.0), 7), LinearCost(), {}),
    "few slots": (lambda: ClosedLoop(traced(1.0), 20), ConstantCost(), {"max_slots": 6}),
    "sessions": (lambda: OpenLoop(conversations()), LinearCost(), {"num_blocks": 60}),
    "small pool": (lambda: OpenLoop(traced(20.0)), LinearCost(), {"num_blocks": 50}),
}


def serve(load: str, patch: pytest.MonkeyPatch, *, single: bool = False, **more: Any) -> Any:
    """The report, every request's record, and how many steps each plan stood for."""
    source, cost, config = LOADS[load]
    plans: list[int] = []
    run = ModelledExecutor.run

    def counted(executor: ModelledExecutor, plan: StepPlan) -> Any:
        plans.append(plan.num_steps)
        return run(executor, plan)

    records: list[Record] = []
    with patch.context() as patched:
        patched.setattr(ModelledExecutor, "run", counted)
        if single:
            patched.setattr(Scheduler, "quiet_steps", lambda scheduler: None)
        made = config_for(**config)
        report = replay(
            source(), made, executor_for(made, cost), seed=3, on_record=records.append, **more
        )
    return to_json(report), records, plans


@pytest.mark.parametrize("load", LOADS)
def test_the_report_is_that_of_single_steps(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, records, plans = serve(load, monkeypatch)
    expected, expected_records, single = serve(load, monkeypatch, single=True)
    assert report == expected and records == expected_records
    assert set(single) == {1} and len(single) == sum(plans)
    if load == "small pool":  # with requests that wait for blocks any step may let one in
        assert max(plans) > 5
    else:
        assert sum(n for n in plans if n > 1) > 0.5 * sum(plans), "most steps are quiet"
        assert len(plans) < 0.6 * len(single)


def test_who_watches_sees_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the timeline have every step; progress is told as often."""

    def watched(**kept: Any) -> Any:
        timeline, events, seen = Timeline(), list[Event](), list[Progress]()
        report, _, plans = serve("light", monkeypatch, observers=[timeline], **kept)
        assert set(plans) == {1}
        logged, _, plans = serve("light", monkeypatch, log=events.append, **kept)
        assert set(plans) == {1} and logged == report
        told, _, plans = serve("light", monkeypatch, on_progress=seen.append, **kept)
        assert told == report
        everything = report, timeline.series(), events
        return msgspec.msgpack.encode(everything, enc_hook=encode_array), len(seen)

    assert watched() == watched(single=True)


def test_the_same_with_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(**speculating(3))
    plans: list[int] = []
    run = ModelledExecutor.run
    monkeypatch.setattr(
        ModelledExecutor,
        "run",
        lambda self, plan: (plans.append(plan.num_steps), run(self, plan))[1],
    )
    report = to_json(replay(OpenLoop(traced(8.0)), config, executor_for(config)))
    monkeypatch.setattr(Scheduler, "quiet_steps", lambda scheduler: None)
    assert report == to_json(replay(OpenLoop(traced(8.0)), config, executor_for(config)))
    assert set(plans) == {1}


def test_a_stretch_past_an_arrival_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: who ignores that somebody comes in between, or when the steps of a
    plan end, reports other times."""
    foresee = ModelledExecutor.foresee

    def heedless(
        executor: ModelledExecutor, quiet: QuietSteps, now_s: float, until_s: float | None
    ) -> list[float]:
        return foresee(executor, quiet, now_s, None)

    def at_once(
        executor: ModelledExecutor, quiet: QuietSteps, now_s: float, until_s: float | None
    ) -> list[float]:
        ends_s = foresee(executor, quiet, now_s, until_s)
        return ends_s[-1:] * len(ends_s)

    for broken in (heedless, at_once):
        with monkeypatch.context() as patch:
            patch.setattr(ModelledExecutor, "foresee", broken)
            with pytest.raises(AssertionError):
                test_the_report_is_that_of_single_steps("light", monkeypatch)
