"""The simulator's speed, and its comparison with engines, on engines whose steps take no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.simulator import __main__ as speed
from bench.simulator import against_engine as against
from bench.simulator import pair
from bench.simulator.prices import TURNS, Calibrating, MeasuredPrices
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.engine import Engine
from sim.cost.measure import designed
from sim.traces.request import TraceRequest
from tests.checking.executor import SimExecutor
from tests.checking.models import ModelledAcceptance
from tests.cli.conftest import INFO
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
COST: Any = calibration(engine=SIZES, draft="d")
FATES = [[1, 0, 1]]


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


def requests(count: int, gap_s: float) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=i * gap_s, prompt_tokens=8, output_tokens=9) for i in range(count)
    ]


def slower(run: pair.ServedRun, factor: float) -> pair.ServedRun:
    ttft_s, tpot_s = ([s * factor for s in values] for values in (run.ttft_s, run.tpot_s))
    return pair.ServedRun(run.duration_s * factor, run.tokens, ttft_s, tpot_s)


def served_as_foretold(runs: pair.EngineRuns, factors: dict[str, tuple[float, ...]]) -> None:
    """By an engine that is the simulator, but for these factors, by policy once a repeat."""
    for case in runs.cases:
        run = pair.ServedRun.of(*pair.foretell(COST, runs, case))
        case.runs = [slower(run, factor) for factor in factors[case.policy]]


def rows_of(runs: pair.EngineRuns, folder: Path, capsys: Any, *words: str) -> list[dict[str, Any]]:
    """What the command says of runs that were kept."""
    cost, kept = folder / "cost.json", folder / "runs.json"
    cost.write_bytes(msgspec.json.encode(COST))
    kept.write_bytes(msgspec.json.encode(runs))
    against.main([*words, "--cost", str(cost), "--runs", str(kept)])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    return found


def test_speed_is_a_table_and_then_one_json_line(capsys, monkeypatch, tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},100,5\n" for i in range(9))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    monkeypatch.setattr("sys.argv", ["bench.simulator", str(trace), "--requests", "4"])
    monkeypatch.setattr(speed, "start_up_s", lambda: 0.5)
    speed.main()
    *table, last = capsys.readouterr().out.strip().split("\n")
    assert any("us_per_step" in line for line in table)
    (row,) = json.loads(last)["results"]
    assert (row["requests"], row["steps"], row["start_up_s"]) == (4, 20, 0.5)
    assert row["us_per_step"] > 0 and row["of_limit"] > 0


def test_fates_are_those_of_the_drafts() -> None:
    """The scripted acceptance is a coin by position: what runs at all depths record is what it
    says, but for the few tokens that nobody drafted."""
    found = pair.record_fates(engine("fixed:8"), PROMPTS)
    assert len(found) == len(PROMPTS) and {len(f) for f in found} == {72}
    model = ModelledAcceptance(0.7)
    same = [
        model.num_accepted(str(i), 0, 0, len(PROMPTS[i]) + at, 1) == fates[at]
        for i, fates in enumerate(found)
        for at in range(1, 64)
    ]
    assert np.mean(same) > 0.99 and 0.5 < np.mean(found) < 0.9


def test_served_counts_from_the_scheduled_arrival() -> None:
    served = pair.serve(engine("off"), requests(12, 0.005), PROMPTS)
    assert served.tokens == 12 * 9 and len(served.ttft_s) == len(served.tpot_s) == 12
    assert min(served.ttft_s) > 0 and min(served.tpot_s) >= 0
    assert served.duration_s >= 11 * 0.005


@pytest.mark.parametrize("latency_s", [0.0, 0.004])
def test_what_was_measured_is_foretold_again(
    latency_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went as the simulator says has no error, the time outside of the engine included;
    one twice as slow is out of bounds."""
    cases = [pair.LoadCase(policy, "light", requests(20, 0.02)) for policy in ("off", "fixed:4")]
    runs = pair.EngineRuns(FATES, cases)
    if latency_s:
        runs.probe_ttft_s = latency_s + _probe_s()
        assert pair.latency_of(COST, runs.probe_ttft_s) == pytest.approx(latency_s)
    served_as_foretold(runs, {"off": (1.0, 1.0, 1.0), "fixed:4": (2.0, 2.2)})
    folder = tmp_path / "kept"
    rows = rows_of(runs, tmp_path, capsys, "--server", "--folder", str(folder))
    assert len(rows) == 10
    for row in rows:
        if row["lookahead"] == "off":
            assert row["within"] and abs(row["error"]) < 1e-3 and row["spread"] == 0
        else:
            assert not row["within"] and row["spread"] == pytest.approx(0.2 / 2.1, abs=0.01)
    assert len((folder / "simulated-off-light.jsonl").read_bytes().splitlines()) == 20


def _probe_s() -> float:
    """Of short requests to an idle engine, as the simulator says; the first finds it just begun."""
    probes = [
        TraceRequest(arrival_s=i / 20, prompt_tokens=pair.PROBE_TOKENS, output_tokens=1)
        for i in range(8)
    ]
    _, (*_, record) = pair.simulate(COST, [[0]], pair.OpenLoop(probes), "off")
    return record.ttft_s


def test_loads_are_shares_of_what_a_policy_serves() -> None:
    cases = against.make_cases(COST, [[1] * 8], PROMPTS, 2.0, ("off", "fixed:4"))
    assert [(c.policy, c.load) for c in cases[:3]] == [("off", load) for load in against.LOADS]
    rates = {(c.policy, c.load): len(c.requests) / (c.requests[-1].arrival_s or 1.0) for c in cases}
    assert rates["off", "over"] > 2 * rates["off", "light"]
    assert rates["fixed:4", "near"] > rates["off", "near"]  # everything is accepted
    over = next(case.requests for case in cases if (case.policy, case.load) == ("off", "over"))
    assert [r.prompt_tokens for r in over] == [8] * len(over)
    report, _ = pair.simulate(COST, [[0]], pair.OpenLoop(over), "off")
    assert report.duration_s > 1.5 * over[-1].arrival_s


def test_every_batch_is_measured_as_often_as_any_other() -> None:
    """However many turns there were: a pass that was begun is gone through."""
    served = engine("fixed:4")
    fitted, held_out = designed(served.scheduler.config)
    calibrating = Calibrating(served, INFO)
    once = calibrating.finish()
    steps = once.fitted.steps // len(fitted)
    assert (once.fitted.steps, once.held_out.steps) == (steps * len(fitted), steps * len(held_out))
    for _ in range(TURNS + 1):
        calibrating.turn()
    more = calibrating.finish()
    assert more.fitted.steps == 3 * once.fitted.steps
    assert more.held_out.steps == 3 * once.held_out.steps
    assert more.engine["max_slots"] == 4 and more.max_rows == 4


def test_prices_are_read_or_measured_but_not_both(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(COST))
    words = ["--cost", str(path)]
    prices = MeasuredPrices(against.parse(words), 4)
    prices.after_run()
    assert prices.first == prices.final() == COST
    with pytest.raises(FieldError, match="leave one of them out"):
        MeasuredPrices(against.parse([*words, "--calibrate", "--runs", "runs.json"]), 4)
