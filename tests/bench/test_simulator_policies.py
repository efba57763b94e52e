"""The comparison of policies, on runs that are made up: no engine, no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import simulator_policies as bench
from bench.simulator_engine import Served
from sim.traces.request import TraceRequest
from tests.bench.test_simulator_engine import PROMPTS, SIZES
from tests.sim.test_calibrated import calibration

FATES = [[1, 0, 1], [1, 1, 0]]


def runs(slower: dict[str, float]) -> bench.Runs:
    """An engine that is the simulator, its policies slower by these factors; the machine is twice
    as slow in the second repeat."""
    requests = [
        TraceRequest(arrival_s=i * 0.001, prompt_tokens=8, output_tokens=9) for i in range(24)
    ]
    found = bench.Runs(FATES, requests, {policy: [] for policy in bench.POLICIES})
    foretold = bench.foretell(calibration(engine=SIZES, draft="d"), found)
    for machine in (1.0, 2.0, 1.0):
        for policy, served in foretold.items():
            factor = machine * slower.get(policy, 1.0)
            times = {
                name: [s * factor for s in getattr(served, name)] for name in ("ttft_s", "tpot_s")
            }
            duration_s = served.duration_s * factor
            found.served[policy].append(Served(duration_s, served.tokens, **times))
    return found


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_points_are_compared_within_a_repeat(
    factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Where the engine does as the simulator says nothing is apart, however the machine drifts; a
    policy that serves more slowly than foretold is out of bounds."""
    measured: Any = calibration(engine=SIZES, draft="d")
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(measured))
    (tmp_path / "runs.json").write_bytes(msgspec.json.encode(runs({"fixed:2": factor})))
    argv = ["x", "--cost", str(tmp_path / "cost.json"), "--runs", str(tmp_path / "runs.json")]
    monkeypatch.setattr("sys.argv", argv)
    bench.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(r["policy"], r["over"], r["measure"]) for r in rows[:2]] == [
        ("fixed:2", "off", "throughput"),
        ("fixed:2", "off", "tpot_mean"),
    ]
    assert len(rows) == 12 and all(row["spread"] == 0 for row in rows)
    for row in rows:
        asked = "fixed:2" in (row["policy"], row["over"])
        assert row["within"] == (factor == 1.0 or not asked), row
        assert (row["apart"] == 0) == (factor == 1.0 or not asked)
    gain = rows[0]
    assert gain["simulated_points"] > 5 and gain["same_sign"] == (gain["engine_points"] > 0)


def test_no_function_is_in_both_sets() -> None:
    served, others = bench.make_prompts()
    assert len(served) == len(others) > 50 and len(served) % 2 == 0
    assert not set(map(tuple, served)) & set(map(tuple, others))
    head, edit = served[:2]
    assert edit[: len(head) - 2] == head[:-2], "an edit begins with the function whose head it is"


def test_the_trace_is_over_what_is_served_without_drafts() -> None:
    measured: Any = calibration(engine=SIZES, draft="d")
    slow, fast = (bench.make_trace(measured, PROMPTS, 120, load) for load in (0.5, 2.0))
    assert [r.prompt_tokens for r in slow] == [8] * 120
    assert slow[-1].arrival_s == pytest.approx(4 * fast[-1].arrival_s)
    report, _ = bench.simulate(measured, [[0]], bench.OpenLoop(fast), "off")
    assert report.duration_s > 1.5 * fast[-1].arrival_s
