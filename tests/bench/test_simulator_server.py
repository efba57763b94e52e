"""The comparison of server and simulator: an engine's own answers, and a client's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import simulator_server as bench
from bench.load.report import MeasuredRecord
from bench.simulator_engine import Case, Runs, Served
from sim.sources import OpenLoop, Remote
from tests.bench.test_simulator_engine import SIZES, requests
from tests.sim.test_calibrated import calibration

LATENCY_S = 0.004


def cost() -> Any:
    return calibration(engine=SIZES, draft="d")


def records(case: Case, slower: float) -> list[MeasuredRecord]:
    """As the client would write them, of a server that is the simulator."""
    _, found = bench.simulate(cost(), [[1]], Remote(OpenLoop(case.requests), LATENCY_S), "off")
    return [
        MeasuredRecord(
            **msgspec.structs.asdict(record)
            | {name: getattr(record, name) * slower for name in ("ttft_s", "tpot_s", "e2e_s")},
            run=0,
            sent_s=record.arrival_s,
            ttft_from_send_s=record.ttft_s,
            chunks=1,
        )
        for record in found
    ]


def test_latency_is_what_the_engine_does_not_explain() -> None:
    probes = [
        bench.TraceRequest(arrival_s=i / 20, prompt_tokens=bench.PROBE_TOKENS, output_tokens=1)
        for i in range(8)
    ]
    _, (*_, record) = bench.simulate(cost(), [[0]], OpenLoop(probes), "off")
    assert bench.latency_of(cost(), record.ttft_s + LATENCY_S) == pytest.approx(LATENCY_S)
    assert bench.latency_of(cost(), 0.0) == 0.0


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_runs_are_foretold_with_the_latency(
    slower: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("off", "near", requests(20, 0.02), [])
    measured = records(case, slower)
    case.runs.append(bench._served(measured))
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(cost()))
    runs = Runs([[1]], [case], latency_s=LATENCY_S)
    (tmp_path / "runs.json").write_bytes(msgspec.json.encode(runs))
    words = ["--cost", str(tmp_path / "cost.json"), "--runs", str(tmp_path / "runs.json")]
    bench.main([*words, "--folder", str(tmp_path / "kept")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert len(rows) == 5
    for row in rows:
        # Its throughput is that of the arrivals; all else is slower.
        assert row["within"] == (slower == 1.0 or row["measure"] == "tokens_per_s"), row
    assert isinstance(case.runs[0], Served)
    lines = (tmp_path / "kept/simulated-off-near.jsonl").read_bytes().splitlines()
    assert len(lines) == 20
