"""Prices from measured steps agree with the true ones, on steps that were not fitted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cbatch.core.prices.terms import ADAPTIVE, DRAFT, HOST, TARGET, ProfiledCost
from msgspec import structs
from msgspec.structs import replace

from cbatch.core.prices.calibration import Accuracy, Calibration, accuracy
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.prices.calibrator import Calibrator, DesignedBatch, designed
from cbatch.engine.prices.fit import fit_profile, nonnegative_least_squares
from sim.cli.costs import read_calibration
from sim.executor.fake import FakeExecutor
from tests.checking.clock import VirtualClock
from tests.checking.executor import SimExecutor
from tests.helpers import make_config, make_request, prefilling

TRUE = CostProfile(
    tokens=(1, 8, 64, 4096),
    target_s=(2e-3, 2e-3, 5e-3, 0.3),
    contexts=(0, 1000, 20000),
    context_s=(0.0, 2e-4, 7e-3),
    idles_s=(0, 0.03, 0.1),
    after_idle_s=(0.0, 1e-3, 2e-3),
    row_s=1e-4,
    draft_setup_s=3e-4,
    draft_pass_s=4e-4,
    draft_token_s=1e-5,
    draft_ingest_s=2e-5,
    further={
        "cold_context_token_s": 2e-7,
        "prefill_pair_s": 2e-8,
        "verify_step_s": 5e-4,
        "host_step_s": 2e-4,
        "host_cold_s": 1e-4,
        "host_idle_s": 3e-3,
        "host_row_s": 5e-6,
        "host_admission_s": 1e-4,
        "host_adaptive_row_s": 1e-5,
        "host_adaptive_admission_s": 5e-4,
    },
)


def composition(rng: np.random.Generator) -> StepWork:
    """Return a random step: decoding rows of some depth, and sometimes a chunk."""
    rows, k = int(rng.integers(0, 33)), int(rng.choice([0, 0, 1, 3, 8]))
    chunk = int(rng.integers(1, 400)) if rng.random() < 0.3 or not rows else 0
    contexts, drafts = rng.integers(10, 800, rows), k * rows
    read = int(contexts.sum())
    return StepWork(
        rows=rows + (chunk > 0),
        decode_rows=rows,
        draft_depth=k if rows else 0,
        draft_tokens=drafts,
        target_tokens=rows + drafts + chunk,
        logit_tokens=rows + drafts + (chunk > 0),
        context_tokens=read + chunk,
        decode_longest_tokens=int(contexts.max(initial=0)),
        prefill_tokens=chunk,
        prefill_context_tokens=chunk,
        prefill_pairs=chunk * (chunk + 1) // 2,
        draft_context_tokens=read if k else 0,
        ingested_tokens=int(rng.integers(0, 50)) if drafts else 0,
        admitted=int(chunk > 0),
        steps_since_prefill=0 if chunk else 1 + int(rng.geometric(0.2)),
        idle_s=float(rng.choice([0.02, 0.1, 0.4])) if chunk and not rows else 0.0,
    )


def samples(count: int, noise: float, seed: int, stalls: float = 0.0) -> list[StepSample]:
    """Return samples of `TRUE`, each duration off by the share `noise`, and some ten times as
    long."""
    costs = [ProfiledCost(TRUE, adaptive=adaptive) for adaptive in (False, True)]
    rng, step_samples = np.random.default_rng(seed), []
    for _ in range(count):
        work, adaptive = composition(rng), bool(rng.random() < 0.3)
        factors = 1 + noise * rng.standard_normal(3)
        factors *= 10 if rng.random() < stalls else 1
        times_s = np.array(costs[adaptive].step_s(work)) * factors
        step_samples.append(StepSample(work, *times_s.tolist(), adaptive))
    return step_samples


def test_prices_predict_other_steps() -> None:
    """1,500 steps with 5 % of noise give 40 prices. Their error is below 1 % in total, where 0.1 %
    is one standard error of the held-out steps' noise. For one step it is little more than the
    step's own noise. If one step in fifty takes ten times as long, as when the machine stalls,
    prices do not rise."""
    prices, exact = fit_profile(samples(1500, 0.05, seed=0)), samples(500, 0.0, seed=2)
    other = accuracy(prices, samples(1500, 0.05, seed=1))
    assert abs(other.total) < 0.01 and other.p50 < 0.05
    assert accuracy(prices, exact).p90 < 0.03
    stalled = samples(1500, 0.05, seed=0, stalls=0.02)
    assert abs(accuracy(fit_profile(stalled), exact).total) < 0.02


def test_least_squares_are_the_best_that_are_not_negative() -> None:
    """The solution is compared with every choice of columns: the optimum is the plain solution of
    one of them."""
    rng = np.random.default_rng(0)
    zeros = 0
    for _ in range(60):
        matrix, values = rng.normal(size=(20, 5)), rng.normal(size=20)
        matrix[:, 4] = 0 if rng.random() < 0.2 else matrix[:, 4]
        solution = nonnegative_least_squares(matrix, values)
        assert (solution >= 0).all()
        least = min(
            float(np.square(matrix[:, list(c)] @ x - values).sum())
            for size in range(6)
            for c in itertools.combinations(range(5), size)
            for x in [np.linalg.lstsq(matrix[:, list(c)], values, rcond=None)[0]]
            if (x >= 0).all()
        )
        assert np.square(matrix @ solution - values).sum() == pytest.approx(least, rel=1e-9)
        zeros += int((solution == 0).sum())
    assert zeros > 60


def test_designed_batches_of_an_engine_that_is_known() -> None:
    """The fake executor's costs are linear, on a virtual clock. A fit to some batches predicts
    others within a hundredth, and the loop takes no time."""
    config = make_config(
        lookahead="fixed:4", num_blocks=600, max_num_seqs=8, max_num_batched_tokens=200, eos_ids=()
    )
    clock = VirtualClock()
    executor = SimExecutor.of(config, clock=clock)
    calibrator = Calibrator(executor, config, clock, pause=clock.advance)
    fitted, held_out = calibrator.fitted, calibrator.held_out
    assert DesignedBatch(8, 8) in fitted and not set(fitted) & set(held_out)
    # Samples may be taken before `measure`.
    calibrator.samples(DesignedBatch(4, None), 4, np.random.default_rng(0))
    calibrator.measure(seed=0, steps=12)
    known, others = calibrator.fitted_samples, calibrator.held_out_samples
    assert (len(known), len(others)) == (12 * len(fitted), 12 * len(held_out))
    assert {s.work.draft_depth for s in known if not s.adaptive} >= {0, 1, 2, 4, 8}
    assert {s.work.draft_depth > 0 for s in known if s.adaptive} == {True, False}
    mixed = [s for s in known if s.work.decode_rows and s.work.prefill_tokens]
    assert len(mixed) > 20 and max(s.host_s for s in known) < 1e-9
    hits = [s for s in known if s.work.admitted and s.work.prefill_context_tokens >= 64]
    assert len(hits) > 10, "prompts of which a prefix cache has the beginning"
    errors = accuracy(fit_profile(known), others)
    assert abs(errors.total) < 0.01 and errors.p90 < 0.02


def test_every_price_has_its_term_and_is_fitted() -> None:
    """At start-up these are the profile's own fields; in full all except the one that a curve
    replaces."""
    fields = {f.name for f in structs.fields(CostProfile) if f.type is float}
    terms, known = set(TARGET | DRAFT | HOST | ADAPTIVE), samples(200, 0.0, seed=0)
    assert fields <= terms
    assert set(fit_profile(known).further) == terms - fields
    short = fit_profile([replace(sample, host_s=0.0) for sample in known], at_startup=True)
    assert not short.further and short.row_s > 0 and short.draft_setup_s > 0
    with pytest.raises(FieldError, match="'rows' is not a term"):
        ProfiledCost(replace(TRUE, further={"rows": 1.0}))


def test_lookups_have_no_price() -> None:
    config = make_config(lookahead="fixed:4")
    with pytest.raises(FieldError, match="--drafter"):
        designed(replace(config, drafter=("ngram",)))
    assert {batch.k for batch in designed(make_config(lookahead="off"))[0]} == {0}


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
    negative["prices"]["row_s"] = -1.0
    for bad in (b"{}", msgspec.json.encode(negative)):
        path.write_bytes(bad)
        with pytest.raises(FieldError, match="--cost"):
            read_calibration(path)
    with pytest.raises(FieldError, match="--cost"):
        read_calibration(tmp_path / "none.json")


def test_host_time_passes_on_the_clock_and_not_in_results() -> None:
    """An engine's executor does not measure the loop around it, either."""
    config, cost = make_config(lookahead="off"), ProfiledCost(TRUE)
    scheduler = Scheduler(config)
    executor = FakeExecutor(max_num_seqs=config.max_num_seqs, cost=cost)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=4), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = executor.run(plan)
    assert executor.host_s == pytest.approx(2e-4 + 1e-4 + 5e-6 + 1e-4)
    assert result.target_s == pytest.approx(cost.step_s(prefilling(1, 3, admitted=1))[1])
