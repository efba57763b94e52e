"""The comparison of engine and simulator, on an engine whose steps take no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench import simulator_engine as bench
from cbatch.core.scheduler import Scheduler
from cbatch.stepwise import Engine
from sim.executor import SimExecutor
from sim.models import ModelledAcceptance
from sim.traces.request import TraceRequest
from tests.helpers import VOCAB_SIZE, make_config
from tests.sim.test_calibrated import calibration

PROMPTS = [[1 + i, *range(7)] for i in range(5)]
SIZES = {
    "num_blocks": 200,
    "block_size_tokens": 4,
    "max_slots": 4,
    "max_model_tokens": 128,
    "step_budget_tokens": 64,
    "draft_context_tokens": 128,
}


def engine(lookahead: str) -> Engine:
    config = make_config(lookahead=lookahead, **SIZES)
    executor = SimExecutor(
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        max_slots=config.max_slots,
        vocab_size=VOCAB_SIZE,
        acceptance=ModelledAcceptance(0.7),
        draft_context_tokens=config.draft_context_tokens,
        drafter=config.default_chain,
    )
    return Engine(Scheduler(config), executor, seed=0)


def test_fates_are_those_of_the_drafts() -> None:
    """The scripted acceptance is a coin by position: what runs at all depths record is what it
    says, but for the few tokens that nobody drafted."""
    found = bench.record_fates(engine("fixed:8"), PROMPTS)
    assert len(found) == len(PROMPTS) and {len(f) for f in found} == {72}
    model, same, total = ModelledAcceptance(0.7), 0, 0
    for i, fates in enumerate(found):
        for at in range(1, 64):
            fate = model.num_accepted(str(i), 0, 0, len(PROMPTS[i]) + at, 1)
            same, total = same + (fate == fates[at]), total + 1
    assert same / total > 0.99
    assert 0.5 < np.mean(found) < 0.9


def requests(count: int, gap_s: float) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=i * gap_s, prompt_tokens=8, output_tokens=9) for i in range(count)
    ]


def test_served_counts_from_the_scheduled_arrival() -> None:
    served = bench.serve(engine("off"), requests(12, 0.005), PROMPTS)
    assert served.tokens == 12 * 9 and len(served.ttft_s) == len(served.tpot_s) == 12
    assert min(served.ttft_s) > 0 and min(served.tpot_s) >= 0
    assert served.duration_s >= 11 * 0.005
    assert set(served.measures()) == {"throughput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"}


def test_what_was_measured_is_foretold_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went as the simulator says has no error; one twice as slow is out of bounds."""
    measured: Any = calibration(engine=SIZES, draft="d")
    fates, cases = [[1, 0, 1]], []
    for policy in ("off", "fixed:4"):
        case = bench.Case(policy, "light", requests(20, 0.02), [])
        report, records = bench.simulate(measured, fates, bench.OpenLoop(case.requests), policy)
        for slower in (1.0, 1.0, 1.0) if policy == "off" else (2.0, 2.2):
            case.runs.append(
                bench.Served(
                    report.duration_s * slower,
                    report.output_tokens,
                    [record.ttft_s * slower for record in records],
                    [(record.tpot_s or 0.0) * slower for record in records],
                )
            )
        cases.append(case)
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(measured))
    (tmp_path / "runs.json").write_bytes(msgspec.json.encode(bench.Runs(fates, cases)))
    argv = ["x", "--cost", str(tmp_path / "cost.json"), "--runs", str(tmp_path / "runs.json")]
    monkeypatch.setattr("sys.argv", argv)
    bench.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert len(rows) == 10
    for row in rows:
        if row["lookahead"] == "off":
            assert row["within"] and abs(row["error"]) < 1e-3 and row["spread"] == 0
        else:
            assert not row["within"] and row["spread"] == pytest.approx(0.2 / 2.1, abs=0.01)


def test_loads_are_shares_of_what_a_policy_serves() -> None:
    cases = bench.make_cases(calibration(engine=SIZES, draft="d"), [[1] * 8], PROMPTS, 2.0)
    assert [(c.policy, c.load) for c in cases[:3]] == [("off", load) for load in bench.LOADS]
    rates = {(c.policy, c.load): len(c.requests) / (c.requests[-1].arrival_s or 1.0) for c in cases}
    assert rates["off", "over"] > 2 * rates["off", "light"]
    assert rates["fixed:4", "near"] > rates["off", "near"]  # everything is accepted
