"""Prices from measured steps agree with the true ones, on steps that were not fitted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from cbatch.core.prices.calibration import Accuracy, Calibration, accuracy
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.prices.calibrator import calibrate
from cbatch.engine.prices.fit import fit_profile
from sim.cli.costs import read_calibration
from sim.executor.acceptance import PositionAcceptance
from sim.executor.fake import FakeExecutor
from tests.checking.cost import LinearCost
from tests.helpers import make_config, make_request, prefilling

TRUE = CostProfile(
    base_s=2e-3,
    token_s=5e-5,
    corner=1.5,
    logit_s=1e-5,
    context_s=2e-7,
    pair_s=2e-8,
    chunk_s=2e-4,
    verify_s=5e-4,
    draft_pass_s=4e-4,
    draft_token_s=1e-5,
)


def composition(rng: np.random.Generator) -> StepWork:
    """Return a random step: decoding rows of some depth, and sometimes a chunk."""
    rows, k = int(rng.integers(0, 33)), int(rng.choice([0, 0, 1, 3, 8]))
    chunk = int(rng.integers(1, 400)) if rng.random() < 0.3 or not rows else 0
    read, drafts = int(rng.integers(10, 800, rows).sum()), k * rows
    return StepWork(
        rows=rows + (chunk > 0),
        decode_rows=rows,
        draft_depth=k if rows else 0,
        draft_tokens=drafts,
        target_tokens=rows + drafts + chunk,
        logit_tokens=rows + drafts + (chunk > 0),
        context_tokens=read + chunk,
        decode_pairs=read * (1 + k),
        prefill_tokens=chunk,
        prefill_context_tokens=chunk,
        prefill_pairs=chunk * (chunk + 1) // 2,
        ingested_tokens=int(rng.integers(0, 50)) if drafts else 0,
    )


def samples(count: int, noise: float, seed: int, stalls: float = 0.0) -> list[StepSample]:
    """Return samples of `TRUE`, each duration off by the share `noise`, and some ten times as
    long."""
    rng, step_samples = np.random.default_rng(seed), []
    for _ in range(count):
        work = composition(rng)
        factors = np.exp(noise * rng.standard_normal(3)) * (10 if rng.random() < stalls else 1)
        times_s = np.array(TRUE.step_s(work)) * factors
        step_samples.append(StepSample(work, *times_s.tolist()))
    return step_samples


def test_prices_predict_other_steps() -> None:
    """If one step in fifty takes ten times as long, as when the machine stalls, prices hardly
    rise."""
    prices, exact = fit_profile(samples(800, 0.05, seed=0)), samples(300, 0.0, seed=2)
    other = accuracy(prices, samples(300, 0.05, seed=1))
    assert abs(other.total) < 0.02 and other.p50 < 0.05
    assert accuracy(prices, exact).p90 < 0.04
    stalled = samples(800, 0.05, seed=0, stalls=0.02)
    assert abs(accuracy(fit_profile(stalled), exact).total) < 0.04


def test_a_calibration_predicts_other_steps_of_a_known_engine() -> None:
    """The fake executor's costs are known. Its loop takes nearly no time."""
    config = make_config(
        lookahead="fixed:4", num_blocks=600, max_num_seqs=8, max_model_len=600, eos_ids=()
    )

    class Engine(FakeExecutor):
        def reset(self) -> None: ...

    acceptance = PositionAcceptance([0.5], max_num_seqs=8)
    slow = LinearCost(base_s=1.0, token_s=0.02, row_s=0.0, draft_pass_s=0.2)
    engine: Any = Engine(max_num_seqs=8, cost=slow, acceptance=acceptance)
    info: Any = type("Info", (), {"model": "m", "draft": "d"})
    result = calibrate(engine, config, info, seconds=300.0)
    assert abs(result.fitted.total) < 0.02 and result.fitted.p90 < 0.05
    assert abs(result.held_out.total) < 0.02 and result.held_out.p90 < 0.05
    assert result.max_rows == 8 and result.held_out.steps >= 5
    with pytest.raises(FieldError, match="--drafter"):
        calibrate(engine, replace(config, drafter=("ngram",)), info, seconds=1.0)
    with pytest.raises(FieldError, match="--max-num-batched-tokens"):
        small = replace(config, max_num_seqs=2, max_num_batched_tokens=32)
        calibrate(engine, small, info, seconds=1.0)


def test_the_loop_around_the_executor_is_measured_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time has a part for each step, for each row and for a new request; one step in ten takes
    far longer."""
    config = make_config(num_blocks=600, max_num_seqs=16, max_model_len=600, eos_ids=())
    now_s, executor_s = [0.0], LinearCost(base_s=0.01, token_s=1e-3, row_s=0.0)

    class Engine(FakeExecutor):
        def reset(self) -> None: ...

        def run(self, plan: StepPlan) -> StepResult:
            result = super().run(plan)
            stalls = 0.5 * (plan.step_id % 10 == 0)
            loop_s = 2e-3 + 3e-4 * plan.num_rows + 5e-3 * len(plan.deltas.new_sequences) + stalls
            now_s[0] += result.target_s + loop_s
            return result

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    engine: Any = Engine(max_num_seqs=16, cost=executor_s)
    info: Any = type("Info", (), {"model": "m", "draft": None})
    prices = calibrate(engine, config, info, seconds=60.0).prices
    for rows in (2, 6, 14):
        work = StepWork.decoding(rows, 64 * rows)
        expected_s = executor_s.step_s(work)[1] + 2e-3 + 3e-4 * rows
        assert sum(prices.step_s(work)) == pytest.approx(expected_s, rel=0.02)
    prompt = prefilling(1, 64)
    expected_s = executor_s.step_s(prompt)[1] + 7.3e-3
    assert sum(prices.step_s(prompt)) == pytest.approx(expected_s, rel=0.04)


def calibration(**more: Any) -> Calibration:
    exact = Accuracy(steps=1, total=0.0, p50=0.0, p90=0.0)
    settings: dict[str, Any] = {
        "model": "m",
        "draft": None,
        "machine": {},
        "versions": {},
        "engine": {"num_blocks": 10, "max_num_seqs": 2},
        "prices": TRUE,
        "profile": None,
        "max_rows": 2,
        "fitted": exact,
        "held_out": exact,
    }
    return Calibration(**(settings | more))


def test_files_are_read_back_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(calibration()))
    assert read_calibration(path) == calibration()
    path.write_bytes(msgspec.json.encode(calibration(version=1)))
    with pytest.raises(FieldError, match="calibrate again"):
        read_calibration(path)
    negative = msgspec.to_builtins(calibration())
    negative["prices"]["token_s"] = -1.0
    for bad in (b"{}", msgspec.json.encode(negative)):
        path.write_bytes(bad)
        with pytest.raises(FieldError, match="--cost"):
            read_calibration(path)
    with pytest.raises(FieldError, match="--cost"):
        read_calibration(tmp_path / "none.json")


def test_host_time_passes_on_the_clock_and_not_in_results() -> None:
    """An engine's executor does not measure the loop around it, either."""

    class WithHost:
        def step_s(self, work: StepWork) -> tuple[float, float, float]:
            return 0.0, TRUE.step_s(work)[1], 3e-4

    config = make_config(lookahead="off")
    scheduler = Scheduler(config)
    executor = FakeExecutor(max_num_seqs=config.max_num_seqs, cost=WithHost())
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=4), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = executor.run(plan)
    assert executor.host_s == 3e-4
    assert result.target_s == pytest.approx(TRUE.step_s(prefilling(1, 3))[1])
