"""Overload is said in plain words with its figure; `mean_running` is the mean of slots in use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cbatch.cli.main import main
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.report.report import Record, Report
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import fixed
from sim.workload.traces.reader import write_requests

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


@pytest.mark.parametrize("more", [{"rate": FAST}, {"rate": SLOW}, {"concurrency": 5}])
def test_mean_running_counts_slots(trace: Path, more: dict[str, object]) -> None:
    """Also those that have no row in a step because its budget is used up."""
    report, records = run(trace, **more)
    assert report.preemptions == 0
    slot_s = sum(record.e2e_s - record.queue_s for record in records)
    assert report.mean_running == pytest.approx(slot_s / report.duration_s, rel=1e-6)


def test_the_command_says_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "requests arrive faster than they are served"
    command = ["sim", str(trace), "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    assert main([*command, "--rate", str(FAST)]) == 0
    out = capsys.readouterr().out
    growth = json.loads(out.splitlines()[-1])["ttft_growth"]
    assert words in out and f"grows by {growth:.3g} s" in out
    assert main([*command, "--rate", str(SLOW)]) == 0
    assert words not in capsys.readouterr().out
    assert main([*command, "--processes", "1", "--sweep", f"rate={SLOW},{FAST}"]) == 0
    assert f"grows by -, {growth:.3g} s" in capsys.readouterr().out
