"""The recorded course of a run: sums over time, and slices for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.config import LookaheadConfig
from sim.cost.base import constant_cost
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.perfetto import PerfettoTrace
from sim.report.report import Report
from sim.report.timeline import Observer, Timeline, TimelineStep
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import uniform
from sim.workload.sources import OpenLoop

SLOTS = 4


def run(*observers: Observer, num_blocks: int = 60) -> Report:
    """Run with drafts, and with preemptions if the pool is small."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=SLOTS,
        max_model_len=600,
        max_num_batched_tokens=96,
        lookahead=LookaheadConfig(policy="fixed", k=3),
        draft_context_tokens=600,
    )
    lengths = uniform(30, 200), uniform(20, 150)
    requests = generate(lambda rng: poisson(3.0, rng), *lengths, requests=40, seed=5)
    executor = FakeExecutor(
        max_num_seqs=SLOTS,
        cost=constant_cost(step_s=0.02),
        acceptance=PositionAcceptance([0.6], max_num_seqs=SLOTS),
    )
    return replay(OpenLoop(requests), config, executor, observers=observers)


class Steps:
    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def step(self, step: TimelineStep) -> None:
        self.rows.append(
            (
                step.started_s,
                step.ended_s,
                len(step.plan.slots),
                int(step.commit.counts.sum()),
                int(step.result.num_drafted.sum()),
                int(step.result.num_accepted.sum()),
            )
        )


@pytest.mark.parametrize("intervals", [8, 240])
def test_intervals_add_up_to_the_run(intervals: int) -> None:
    timeline, steps = Timeline(intervals), Steps()
    report = run(timeline, steps)
    series = timeline.series()
    assert 1 < len(series.running) <= intervals
    assert series.length_s * len(series.running) >= report.duration_s
    started_s, ended_s, rows, tokens, drafted, accepted = np.array(steps.rows).T
    at = ((ended_s - series.first_s) / series.length_s).astype(int)
    for index, running in enumerate(series.running):
        here = at == index
        if not here.any():
            assert running is None
            continue
        seconds = (ended_s - started_s)[here]
        assert running == pytest.approx((rows[here] * seconds).sum() / seconds.sum(), rel=1e-4)
        rate = tokens[here].sum() / series.length_s
        assert series.output_tokens_per_s[index] == pytest.approx(rate, rel=1e-4)
        if drafted[here].sum():
            share = accepted[here].sum() / drafted[here].sum()
            assert series.acceptance[index] == pytest.approx(share, rel=1e-4)
    total = sum(rate or 0.0 for rate in series.output_tokens_per_s) * series.length_s
    assert total == pytest.approx(report.output_tokens, rel=1e-3)


def test_observers_change_nothing() -> None:
    assert run(Timeline(), Steps()) == run()


def test_slices_of_a_slot_follow_each_other(tmp_path: Path) -> None:
    with PerfettoTrace(tmp_path / "trace.json") as trace:
        report = run(trace, num_blocks=24)
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())
    assert report.preemptions
    slices = [event for event in events if event["ph"] == "X"]
    steps = [event for event in slices if event["tid"] == 1]
    assert len(steps) == report.steps
    assert sum(event["args"]["tokens"] for event in steps) == report.output_tokens
    ends = [event["args"]["ended"] for event in slices if event["tid"] > 1]
    assert ends.count("length") == report.requests
    assert ends.count("preempted") == report.preemptions
    for slot in range(SLOTS):
        of_slot = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == slot + 2)
        assert of_slot
        for (_, ended), (started, _) in zip(of_slot, of_slot[1:], strict=False):
            assert started >= ended - 1e-3
