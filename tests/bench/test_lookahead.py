"""Benchmarks of lookahead: prompts, the closed loop, statistics, and how survival is foreseen."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from bench.engine import survival
from bench.engine.survival import errors_of
from bench.lookahead import EndlessLoop, PolicyRun, make_prompts, rows_of, spoilt_drafts
from bench.plot import save_lines
from cbatch import EngineOptions, load_engine
from cbatch.core.speculation.cost_model import CostProfile
from cbatch.demo import demo_paths
from cbatch.text.outputs import Speculation


def run_of(tokens_per_s: float) -> PolicyRun:
    return PolicyRun(100, 100 / tokens_per_s, Speculation(steps=10, k_histogram={0: 4, 2: 6}))


def test_ratios_are_paired_and_the_best_constant_is_found_afterwards():
    runs = {
        "off": [run_of(100.0), run_of(50.0), run_of(200.0)],
        "fixed:2": [run_of(120.0), run_of(60.0), run_of(240.0)],
        "goodput": [run_of(132.0), run_of(66.0), run_of(264.0)],
    }
    rows = {row["policy"]: row for row in rows_of("mix", 8, runs)}
    assert rows["goodput"]["ratio_to_off"] == pytest.approx(1.32)
    assert rows["goodput"]["ratio_to_off_low95"] == pytest.approx(1.32), "pairs do not vary"
    assert rows["goodput"]["ratio_to_best_fixed"] == pytest.approx(1.1)
    assert {row["best_fixed"] for row in rows.values()} == {"fixed:2"}
    assert rows["goodput"]["ci95"] > 100, "the speeds themselves do"
    assert rows["goodput"]["steps_with_drafts"] == 0.6
    (row,) = rows_of("edit", 1, {"off": [run_of(10.0)]})
    assert row["ci95"] is None and row["ratio_to_off_low95"] is None


def test_a_mix_takes_both_kinds_in_turn():
    model = demo_paths()[0]
    fresh, edit, mix = (make_prompts(name, model) for name in ("fresh", "edit", "mix"))
    assert mix[0:6:2] == fresh[:3] and mix[1:6:2] == edit[:3]
    assert {*map(tuple, mix)} == {*map(tuple, fresh), *map(tuple, edit)}


def test_a_loop_stays_full_and_counts_what_comes_out():
    options = EngineOptions(lookahead="fixed:3", max_slots=2, max_model_tokens=128)
    engine, _ = load_engine(*demo_paths(), options)
    prompts = [prompt[:20] for prompt in make_prompts("fresh", demo_paths()[0])[:5]]
    loop = EndlessLoop(engine, prompts, 2, 6)
    loop.start()
    before = engine.scheduler.stats.emitted_tokens
    runs = [loop.run(20), loop.run(20)]
    assert engine.scheduler.num_running + engine.scheduler.num_waiting == 2
    assert sum(run.tokens for run in runs) == engine.scheduler.stats.emitted_tokens - before
    assert 20 <= runs[0].tokens < 28
    assert 40 <= runs[0].tokens + runs[1].tokens < 48, "one turn's surplus is the next one's"
    total = PolicyRun(0, 0.0, Speculation())
    for run in runs:
        total.add(run)
    assert total.seconds == runs[0].seconds + runs[1].seconds
    assert total.speculation.drafted_tokens > 0 and 0 < total.speculation.drafting_share <= 1
    loop.stop()
    assert not engine.has_work


def test_spoilt_drafts_are_hardly_ever_accepted():
    options = EngineOptions(lookahead="fixed:3", max_slots=2, max_model_tokens=128)
    engine, _ = load_engine(*demo_paths(), options)
    prompts = [prompt[:20] for prompt in make_prompts("fresh", demo_paths()[0])[:5]]
    found = []
    for spoilt in (True, False):
        with spoilt_drafts() if spoilt else nullcontext():
            loop = EndlessLoop(engine, prompts, 2, 40)
            loop.start()
            found.append(loop.run(400).speculation.acceptance)
            loop.stop()
    assert found[0] < 0.25 < 0.5 < found[1], found


def test_a_plot_is_a_picture(tmp_path):
    panels = {"fresh": {"off": [(1, 1.0), (2, 1.0)], "goodput": [(1, 1.5), (2, 1.2)]}}
    path = tmp_path / "new" / "plot.png"
    save_lines(path, panels, x_label="load", y_label="speed", highlight="goodput")
    assert path.read_bytes().startswith(b"\x89PNG")


def coins(rng: np.random.Generator, predicted: np.ndarray, shift: float) -> np.ndarray:
    observed: np.ndarray = (rng.random(predicted.shape) < predicted + shift).astype(float)
    return observed


def test_errors_of_a_right_and_of_a_wrong_prediction():
    rng = np.random.default_rng(2)
    predicted = rng.uniform(0.2, 0.8, (4000, 3))
    predicted[::2, 2] = np.nan  # not drafted
    right = errors_of(predicted, coins(rng, np.nan_to_num(predicted), 0.0))
    assert right.error < 2 * right.by_chance < 0.025 and right.by_depth < 0.02
    low = errors_of(predicted, coins(rng, np.nan_to_num(predicted), 0.1))
    assert low.error == pytest.approx(0.1, abs=0.02) and low.by_both == pytest.approx(0.1, abs=0.02)
    # Right on average and never where it says so: bins see it, a single one does not.
    flat = errors_of(predicted, coins(rng, np.full(predicted.shape, 0.5), 0.0))
    assert flat.by_depth < 0.02 and flat.error > 0.1


def test_a_small_run_keeps_what_was_believed(monkeypatch):
    """Prices by which drafts pay at first: a busy machine may measure others."""
    cheap = CostProfile((1, 2), (0.1, 0.1))
    monkeypatch.setattr("cbatch.engine.kept_prices.cached_profile", lambda *_: cheap)
    args = survival.parse(["--tokens", "200", "--output-tokens", "24"])
    row = survival.measure("fresh", "rejection", args)
    assert row["drafts"] > 50 and 0 < row["observed"] < 1 and row["error"] < 0.5
