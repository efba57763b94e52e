"""Reports: percentiles, sums over time, slices for a trace viewer, and the page of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.load.run.report import read_reports
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.config import LookaheadConfig
from sim.cost.base import constant_cost
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.page.view import MAX_POINTS, PageCollector, page, write_page
from sim.report.perfetto import PerfettoTrace
from sim.report.report import Record, Report, weighted_percentiles
from sim.report.timeline import Observer, Timeline, TimelineStep
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import uniform
from sim.workload.sources import OpenLoop
from tests.sim import test_replay


@pytest.mark.parametrize("seed", range(5))
def test_weighted_percentiles_are_those_of_the_repeated_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice([0.1, 0.2, 0.25, 7.0], 30) + rng.random(30) * (seed % 2)
    weights = rng.integers(1, 9, 30)
    percents = (0.0, 50.0, 90.0, 99.0, 100.0)
    expected = np.percentile(np.repeat(values, weights), percents)
    assert weighted_percentiles(values, weights, percents) == pytest.approx(expected, rel=1e-12)


def test_schema_has_the_names_of_the_load_tester() -> None:
    report = test_replay.run(test_replay.OpenLoop(test_replay.workload(10)))
    document = json.loads(test_replay.to_json(report))
    assert document["schema"] == "cbatch-report" and document["version"] == 1
    assert {"requests", "duration_s", "output_tokens_per_s"} <= set(document)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert {"mean", "p50", "p90", "p99"} <= set(document[name])
    assert read_reports(test_replay.to_json(report)) == ([report], [""])
    with pytest.raises(ValueError, match="version 2"):
        read_reports(json.dumps(document | {"version": 2}).encode())


SLOTS = 4


def observed(*observers: Observer, num_blocks: int = 60) -> Report:
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
    report = observed(timeline, steps)
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


def test_slices_of_a_slot_follow_each_other(tmp_path: Path) -> None:
    with PerfettoTrace(tmp_path / "trace.json") as trace:
        report = observed(trace, num_blocks=24)
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


CHROMIUM = shutil.which("chromium")


def record(index: int, ttft_s: float, tpot_s: float | None) -> Record:
    return Record(
        index=index,
        arrival_s=index / 10,
        prompt_tokens=10,
        output_tokens=5,
        queue_s=0.0,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=1.0,
        prefix_hit_tokens=0,
        preemptions=0,
    )


@pytest.fixture(scope="module")
def seen() -> tuple[Report, Timeline]:
    timeline = Timeline()
    return observed(timeline), timeline


def document(html: str) -> dict[str, object]:
    line = next(line for line in html.splitlines() if line.startswith("const DATA = "))
    data: dict[str, object] = json.loads(line.removeprefix("const DATA = ").removesuffix(";"))
    return data


def test_it_holds_reports_quantiles_and_no_more_points_than_can_be_drawn(
    seen: tuple[Report, Timeline],
) -> None:
    report, timeline = seen
    rng = np.random.default_rng(1)
    times_s = rng.exponential(1.0, 3 * MAX_POINTS)
    collector = PageCollector()
    for index, time_s in enumerate(times_s.tolist()):
        collector(record(index, time_s, None if index % 3 else 0.01))
    view = collector.view("a", report, timeline.series())
    assert view.quantiles["ttft_s"][100] == pytest.approx(np.median(times_s), rel=1e-5)
    assert set(view.quantiles["tpot_s"]) == {0.01}
    assert view.points is not None and view.points.num_requests == len(times_s)
    assert len(view.points.ttft_s) == len(view.points.tpot_s) == MAX_POINTS
    assert view.points.arrival_s == sorted(view.points.arrival_s)
    data = document(page("title", [view]))
    assert data["title"] == "title"
    assert len(page("title", [view])) < 400_000


def test_a_name_cannot_leave_the_script(seen: tuple[Report, Timeline]) -> None:
    evil = "</script><script>alert(1)</script><!--"
    html = page(evil, [PageCollector().view(evil, seen[0])])
    assert html.count("</script>") == 1 and document(html)["title"] == evil


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_it(seen: tuple[Report, Timeline], tmp_path: Path) -> None:
    report, timeline = seen
    settings = {"model": "llama-70b", "gpu": "H100", "cost": "roofline", "draft_model": None}
    report, views = msgspec.structs.replace(report, settings=settings), []
    for name in ("first", "second", "third"):
        collector = PageCollector()
        for index in range(40):
            collector(record(index, 0.1 + index / 100, 0.01 + index / 1e4))
        views.append(collector.view(name, report, timeline.series()))
    write_page(tmp_path / "page.html", "three runs", views)
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>three runs</title>" in dom
    for title in ("Time to first token", "Batch", "KV pool", "Lookahead", "Acceptance"):
        assert f"<h2>{title}</h2>" in dom
    assert dom.count('class="series"') >= 3 * 9 and dom.count('class="dot"') >= 240
    assert dom.count('aria-pressed="true"') == 3
    assert "settings of third" in dom and "NaN" not in dom
    assert ", model llama-70b, gpu H100" in dom
