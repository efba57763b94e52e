"""The search gives the capacity that a formula gives; overload is said with its figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cbatch.cli.main import main
from cbatch.core.scheduler.config import SchedulerConfig
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.cost.base import constant_cost
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.capacity import (
    MAX_GROWTH,
    MIN_REQUESTS,
    Capacity,
    ServiceLevel,
    Trial,
    find_capacity,
    judge,
    try_rate,
)
from sim.report.report import Objectives, Record, Report
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import fixed
from sim.workload.sources import OpenLoop
from sim.workload.traces.reader import write_requests
from sim.workload.traces.request import TraceRequest

STEP_S, OUTPUT_TOKENS, REQUESTS = 0.01, 3, 60
SERVICE_S = STEP_S * OUTPUT_TOKENS
GAP_S = 0.06
WIDE = {"lowest": 1 / 8, "highest": 8.0}


def serving(
    level: ServiceLevel, output_tokens: int = OUTPUT_TOKENS, requests: int = REQUESTS
) -> Callable[..., Trial]:
    """One slot, `requests` at regular intervals, every step the same: a D/D/1 queue."""
    config = SchedulerConfig(num_blocks=100, max_num_seqs=1, max_model_len=500)

    def serve(rate: float, rounds: int = 1) -> Trial:
        arriving = (
            TraceRequest(arrival_s=i * GAP_S / rate, prompt_tokens=9, output_tokens=output_tokens)
            for i in range(requests * rounds)
        )
        executor = FakeExecutor(max_num_seqs=1, cost=constant_cost(step_s=STEP_S))
        records: list[Record] = []
        report = replay(
            OpenLoop(arriving),
            config,
            executor,
            objectives=level.objectives,
            on_record=records.append,
        )
        return judge(rate, report, records, level, rounds)

    return serve


def expected_rate(ttft_s: float, rank: float) -> float:
    """Return the rate by the formula. Request i waits for i (service - gap) once the gap is
    shorter: TTFT at `rank` of the last index is that wait and one step."""
    wait_s = (ttft_s - STEP_S) / (rank * (REQUESTS - 1))
    return GAP_S / (SERVICE_S - wait_s)


def is_bracketed(capacity: Capacity, rate: float) -> bool:
    failed = min(one.rate for one in capacity.tried if not one.meets)
    assert capacity.best is not None
    return capacity.best.rate <= rate <= failed <= capacity.best.rate * 1.02


@pytest.mark.parametrize(("ttft_s", "percentile"), [(0.5, 99.0), (0.5, 50.0), (0.02, 99.0)])
def test_a_queue_of_fixed_times_has_a_closed_form(ttft_s: float, percentile: float) -> None:
    level = ServiceLevel(objectives=Objectives(ttft_s=ttft_s), percentile=percentile)
    capacity = find_capacity(serving(level), **WIDE)
    rate = expected_rate(ttft_s, percentile / 100)
    assert capacity.ends == "between" and is_bracketed(capacity, rate)
    assert rate > GAP_S / SERVICE_S
    assert capacity.best is not None
    assert capacity.best.arrivals_per_s == pytest.approx(capacity.best.rate / GAP_S)
    assert capacity.tried[0].rate == 1 and len(capacity.tried) < 14


def test_a_burst_is_no_capacity() -> None:
    """A growing queue is no capacity, however short the trace and lenient the objective."""
    serve = serving(ServiceLevel(objectives=Objectives(tpot_s=0.02)), requests=4)
    capacity = find_capacity(lambda rate: try_rate(partial(serve, rate)), lowest=1.0, highest=4.0)
    assert capacity.best is not None
    service_rate = GAP_S / SERVICE_S
    assert 0.98 * service_rate <= capacity.best.rate <= (1 + MAX_GROWTH) * service_rate
    assert 4 * capacity.best.rounds >= MIN_REQUESTS


def test_a_share_of_good_requests_has_a_closed_form() -> None:
    """With 90 % within the objective, the request at nine tenths of the queue waits exactly that
    long."""
    objectives = Objectives(ttft_s=0.5)
    share = ServiceLevel(objectives=objectives, percentile=None, goodput_share=0.9)
    capacity = find_capacity(serving(share), **WIDE)
    assert is_bracketed(capacity, expected_rate(0.5, (0.9 * REQUESTS - 1) / (REQUESTS - 1)))
    both = ServiceLevel(objectives=objectives, percentile=99.0, goodput_share=0.9)
    stricter = find_capacity(serving(both), **WIDE)
    assert is_bracketed(stricter, expected_rate(0.5, 0.99))


FAST, SLOW = 400.0, 3.0  # requests a second; the device serves some 60


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "made.jsonl"
    lengths = fixed(500), fixed(100)
    write_requests(path, generate(lambda rng: poisson(1.0, rng), *lengths, requests=200, seed=0))
    return path


def run(trace: Path, **more: object) -> tuple[Report, list[Record]]:
    records: list[Record] = []
    scenario = Scenario(trace=str(trace), max_num_seqs=8, max_num_batched_tokens=512, **more)  # type: ignore[arg-type]
    return build(scenario).run(on_record=records.append), records


@pytest.mark.parametrize(
    ("more", "overloaded"),
    [
        ({"rate": FAST}, True),
        ({"rate": FAST, "replicas": 2}, True),
        ({"rate": SLOW}, False),
        ({"concurrency": 40}, False),
        ({"rate": FAST, "requests": 10}, False),  # too few to judge
    ],
)
def test_growth_of_ttft(trace: Path, more: dict[str, object], overloaded: bool) -> None:
    report, records = run(trace, **more)
    if not overloaded:
        assert report.ttft_growth is None
        return
    ordered = sorted(records, key=lambda record: record.arrival_s)
    half = len(ordered) // 2
    grown_s = np.mean([r.ttft_s for r in ordered[half:]]) - np.mean(
        [r.ttft_s for r in ordered[:half]]
    )
    apart_s = np.mean([r.arrival_s for r in ordered[half:]]) - np.mean(
        [r.arrival_s for r in ordered[:half]]
    )
    assert report.ttft_growth == pytest.approx(grown_s / apart_s, rel=0.1)
    slot_s = sum(record.e2e_s - record.queue_s for record in records)
    assert report.mean_running == pytest.approx(slot_s / report.duration_s, rel=1e-6)


def test_the_command_says_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "requests arrive faster than they are served"
    command = ["sim", str(trace), "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    assert main([*command, "--rate", str(FAST)]) == 0
    out = capsys.readouterr().out
    growth = json.loads(out.splitlines()[-1])["ttft_growth"]
    assert words in out and f"grows by {growth:.3g} s" in out
    assert main([*command, "--processes", "1", "--sweep", f"rate={SLOW},{FAST}"]) == 0
    assert f"grows by -, {growth:.3g} s" in capsys.readouterr().out
