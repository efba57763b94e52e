"""A replay measures by its definitions, refuses requests that cannot run, and repeats itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Added, Committed, Event, Planned
from cbatch.core.scheduler.scheduler import Scheduler
from sim.cost.base import constant_cost
from sim.replay.replay import replay
from sim.replay.replica import Progress
from sim.report.report import Objectives, Record, Report, to_json
from sim.workload.arrivals import poisson
from sim.workload.generate import Conversations, converse, generate
from sim.workload.lengths import fixed, uniform
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source
from sim.workload.traces.request import TraceRequest
from tests.sim.replays import config_for, executor_for, speculating

ROOT = Path(__file__).parents[2]


def workload(count: int = 120, rate: float = 20.0, seed: int = 1) -> Iterable[TraceRequest]:
    lengths = uniform(1, 300), uniform(1, 60)
    return generate(lambda rng: poisson(rate, rng), *lengths, requests=count, seed=seed)


def run(
    source: Source, config: SchedulerConfig | None = None, cost: Any = None, **more: Any
) -> Report:
    config = config or config_for()
    return replay(source, config, executor_for(config, cost), **more)


def measured_from(events: list[Event]) -> dict[str, dict[str, Any]]:
    """Return every request's measures, from the step log alone and one token at a time: slow and
    plain."""
    scheduler, entries, now_s = None, {}, 0.0
    for event in events:
        match event:
            case Added(request, at_s):
                assert scheduler is not None
                scheduler.add(request, at_s)
                entries[request.request_id] = {"arrival_s": at_s, "times_s": [], "queue_s": None}
            case Planned(now_s):
                assert scheduler is not None
                plan = scheduler.schedule(now_s)
                for admission in plan.deltas.new_sequences if plan else ():
                    entry = entries[admission.request_id]
                    if entry["queue_s"] is None:
                        entry["queue_s"] = now_s - entry["arrival_s"]
            case Committed(result, now_s):
                assert scheduler is not None
                for row in scheduler.update_from_output(result, now_s).updates():
                    entries[row.request_id]["times_s"].append((now_s, len(row.tokens)))
            case _:
                scheduler = Scheduler(event.config)  # type: ignore[attr-defined]
    return entries


@pytest.mark.parametrize(
    ("more", "what"),
    [({}, "decodes"), (speculating(3), "drafts"), ({"num_blocks": 60}, "preempts")],
)
def test_measures_are_what_the_log_says(more: dict[str, Any], what: str) -> None:
    events: list[Event] = []
    records: list[Record] = []
    requests = list(workload())
    report = run(
        OpenLoop(requests), config_for(**more), log=events.append, on_record=records.append
    )
    expected = measured_from(events)
    assert report.requests == len(records) == len(expected) == 120
    gaps_s, tokens = [], []
    for record in records:
        entry = expected[str(record.index)]
        (first_s, first_count), *later = entry["times_s"]
        last_s = entry["times_s"][-1][0]
        count = first_count + sum(n for _, n in later)
        assert record.output_tokens == count == requests[record.index].output_tokens
        assert record.queue_s == pytest.approx(entry["queue_s"], abs=1e-9)
        assert record.ttft_s == pytest.approx(first_s - record.arrival_s, abs=1e-9)
        assert record.e2e_s == pytest.approx(last_s - record.arrival_s, abs=1e-9)
        tpot_s = (last_s - first_s) / (count - 1) if count > 1 else None
        assert record.tpot_s == (None if tpot_s is None else pytest.approx(tpot_s, abs=1e-9))
        times_s = [t for t, _ in entry["times_s"]]
        gaps_s += np.diff(times_s).tolist()
        tokens += [n for _, n in later]
    pooled = np.repeat(np.asarray(gaps_s) / tokens, tokens)
    for spread, values in (
        (report.ttft_s, [r.ttft_s for r in records]),
        (report.tpot_s, [r.tpot_s for r in records if r.tpot_s is not None]),
        (report.e2e_s, [r.e2e_s for r in records]),
        (report.queue_s, [r.queue_s for r in records]),
        (report.itl_s, pooled),
        (report.chunk_gap_s, gaps_s),
    ):
        assert spread.count == len(values)
        assert spread.mean == pytest.approx(np.mean(values), rel=1e-9)
        cuts = np.percentile(values, (50, 90, 99))
        assert (spread.p50, spread.p90, spread.p99) == pytest.approx(cuts, rel=1e-9)
        assert spread.max == pytest.approx(np.max(values), rel=1e-9)
    assert report.output_tokens == sum(r.output_tokens for r in requests)
    assert report.duration_s == pytest.approx(max(r.arrival_s + r.e2e_s for r in records))
    assert (report.preemptions or 0) == sum(r.preemptions for r in records)
    # The condition of each case has occurred.
    assert (report.preemptions or 0 > 0) if what == "preempts" else not report.preemptions
    assert (report.itl_s.count > report.chunk_gap_s.count) == (what == "drafts")
    assert (report.speculation is not None) == (what == "drafts")


def test_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """Another hash seed and another time of day give the same report."""
    code = """if True:
        import sys
        from tests.sim.test_replay import *
        sys.stdout.buffer.write(to_json(run(OpenLoop(workload()), config_for(**speculating(2)))))
    """
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    reports = [
        to_json(run(OpenLoop(workload()), config_for(**speculating(2)), seed=s)) for s in (0, 4)
    ]
    assert json.loads(reports[0])["requests"] == 120
    assert [other.stdout == report for report in reports] == [True, False], "the seed decides"


def test_the_simulator_reads_no_clock_and_has_no_state_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = threading.get_ident()  # another test may have left a server in a thread of its own

    def forbid(name: str) -> None:
        original = resolve_name(name)

        def forbidden(*args: Any) -> Any:
            if threading.get_ident() == here:
                raise AssertionError(f"{name} was called")
            return original(*args)

        monkeypatch.setattr(name, forbidden)

    for name in ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns"):
        forbid(f"time.{name}")
    for name in ("random", "rand", "standard_normal", "poisson"):
        forbid(f"numpy.random.{name}")
    assert run(OpenLoop(workload()), config_for(**speculating(2))).requests == 120


def test_what_cannot_run_is_reported_and_the_others_go_on() -> None:
    def request(arrival_s: float, prompt: int, output: int) -> TraceRequest:
        return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)

    requests = [request(0, 100, 5), request(0.1, 1600, 5), request(0.2, 900, 400), request(9, 9, 9)]
    report = run(OpenLoop(requests), config_for(num_blocks=64))  # 1,024 tokens
    assert report.requests == 3 and report.cut_requests == 1
    (refused,) = report.refused
    assert (refused.index, refused.prompt_tokens) == (1, 1600) and "pool" in refused.reason
    assert report.output_tokens == 5 + (1024 - 900) + 9
    closed = run(ClosedLoop(requests, 1), config_for(num_blocks=64))
    assert (closed.requests, len(closed.refused)) == (3, 1), "its client goes on to the next"


def test_constant_cost_by_hand() -> None:
    """Requests run one at a time, with 10 ms a step and prompts of one chunk: n tokens take n
    steps."""
    requests = [
        TraceRequest(arrival_s=i * 1.0, prompt_tokens=50, output_tokens=n)
        for i, n in enumerate((1, 4, 10))
    ]
    records: list[Record] = []
    report = run(OpenLoop(requests), cost=constant_cost(), on_record=records.append)
    assert [r.ttft_s for r in records] == pytest.approx([0.01] * 3)
    assert [r.e2e_s for r in records] == pytest.approx([0.01, 0.04, 0.1])
    assert [r.tpot_s for r in records] == [None, pytest.approx(0.01), pytest.approx(0.01)]
    assert report.steps == 15 and report.duration_s == pytest.approx(2.1)
    assert report.output_tokens_per_s == pytest.approx(15 / 2.1)
    assert report.mean_running == pytest.approx(0.15 / 2.1)
    assert report.itl_s.count == 12


def test_what_is_spent_outside_of_the_engine_is_the_requests() -> None:
    """It counts in the times to the first token and to the last, but not between them. A client
    sends its next request when it has the answer."""
    requests = [
        TraceRequest(arrival_s=i * 1.0, prompt_tokens=50, output_tokens=4) for i in range(3)
    ]
    records: list[Record] = []
    source = Remote(OpenLoop(requests), 0.005)
    report = run(source, cost=constant_cost(), on_record=records.append)
    assert [r.ttft_s for r in records] == pytest.approx([0.015] * 3)
    assert [r.e2e_s for r in records] == pytest.approx([0.045] * 3)
    assert [r.tpot_s for r in records] == pytest.approx([0.01] * 3)
    assert report.duration_s == pytest.approx(2.045)
    clients = run(Remote(ClosedLoop(requests, 1), 0.005), cost=constant_cost())
    assert clients.duration_s == pytest.approx(3 * 0.045)
    with pytest.raises(FieldError, match="latency"):
        Remote(OpenLoop(requests), -1.0)


def test_goodput_counts_requests_that_keep_all_their_objectives() -> None:
    def request(index: int, **own: float) -> TraceRequest:
        return TraceRequest(arrival_s=index * 1.0, prompt_tokens=9, output_tokens=5, **own)

    requests = [
        request(0),
        request(1, ttft_slo_s=0.005),
        request(2, e2e_slo_s=0.06),
        request(3, tpot_slo_s=0.009),
        request(4, ttft_slo_s=0.5),
    ]

    def good(**objectives: float) -> float:
        usual = Objectives(**objectives)
        goodput = run(OpenLoop(requests), cost=constant_cost(), objectives=usual).goodput
        assert goodput is not None and goodput.objectives == usual
        assert goodput.share == goodput.requests / 5
        return goodput.requests

    assert good() == 3  # all except those whose own objective is missed
    assert good(ttft_s=0.009) == 1  # only the one whose own objective is wider
    assert good(e2e_s=0.049) == 1  # as is that of the third
    assert run(OpenLoop(requests)).goodput is None


def test_sessions_find_their_history_in_the_prefix_cache() -> None:
    made = Conversations(turns=fixed(5), messages=fixed(20), outputs=fixed(40))
    requests = list(converse(lambda rng: poisson(5.0, rng), made, sessions=12, seed=2))
    records: list[Record] = []
    run(OpenLoop(requests), config_for(num_blocks=4000), on_record=records.append)
    for record in records:
        turn = record.index % 5
        # All but the last token, which is always computed, and the tokens that fill no block.
        known = turn * 60 - 1 if turn else 0
        assert record.prefix_hit_tokens == known // 16 * 16
    starts_s = {r.index: r.arrival_s for r in records}
    ends_s = {r.index: r.arrival_s + r.e2e_s for r in records}
    for index, request in enumerate(requests):
        if request.think_s is not None:
            assert starts_s[index] == pytest.approx(ends_s[index - 1] + request.think_s)
    assert [r.index for r in records] != sorted(starts_s), "sessions ran side by side"
    none = run(OpenLoop(requests), config_for(num_blocks=4000, enable_prefix_caching=False))
    assert none.prefix_hit_tokens == 0


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    report = run(OpenLoop(workload()), on_progress=seen.append)
    assert 1 < len(seen) <= (report.steps or 0) // 512 + 1
    assert seen[-1].finished == 120 and seen[-1].steps == report.steps
    assert [p.now_s for p in seen] == sorted(p.now_s for p in seen)


def test_to_record_cache_events_changes_nothing() -> None:
    reports = [
        run(OpenLoop(workload()), config_for(kv_events=kv_events, num_blocks=60, **speculating(3)))
        for kv_events in (False, True)
    ]
    assert reports[0] == reports[1] and reports[0].preemptions
