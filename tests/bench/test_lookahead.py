"""Benchmarks of lookahead: prompts, the closed loop, statistics."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest

from bench.lookahead import (
    CHATS,
    EndlessLoop,
    PolicyRun,
    expected_survival_error,
    make_prompts,
    randomised_drafts,
    rows_of,
    survival_error,
)
from bench.plot import save_lines
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.demo import demo_paths
from cbatch.text.outputs import Speculation


def run_of(tokens_per_s: float) -> PolicyRun:
    return PolicyRun(100, 100 / tokens_per_s, Speculation(steps=10, k_histogram={0: 4, 2: 6}))


def test_ratios_are_paired_and_the_best_constant_is_found_afterwards():
    runs = {
        "off": [run_of(100.0), run_of(50.0), run_of(200.0)],
        "fixed:2": [run_of(120.0), run_of(60.0), run_of(240.0)],
        "adaptive": [run_of(132.0), run_of(66.0), run_of(264.0)],
    }
    rows = {row["policy"]: row for row in rows_of("mix", 8, runs)}
    assert rows["adaptive"]["ratio_to_off"] == pytest.approx(1.32)
    assert rows["adaptive"]["ratio_to_off_low95"] == pytest.approx(1.32), "pairs do not vary"
    assert rows["adaptive"]["ratio_to_best_fixed"] == pytest.approx(1.1)
    assert {row["best_fixed"] for row in rows.values()} == {"fixed:2"}
    assert rows["adaptive"]["ci95"] > 100, "the speeds themselves do"
    assert rows["adaptive"]["steps_with_drafts"] == 0.6
    (row,) = rows_of("edit", 1, {"off": [run_of(10.0)]})
    assert row["ci95"] is None and row["ratio_to_off_low95"] is None
    assert row["survival_error"] is None


def test_the_error_of_predictions_is_by_depth_and_over_all_runs():
    first, second = run_of(1.0), run_of(1.0)
    first.survival = np.array([[60.0, 40.0], [50.0, 20.0], [40.0, 22.0]])
    second.survival = np.array([[60.0, 40.0], [50.0, 20.0], [56.0, 22.0]])
    assert survival_error([first, second, run_of(1.0)]) == pytest.approx((4 + 4) / 200)
    assert survival_error([first]) == pytest.approx((10 + 2) / 100), "depths do not make up"


def test_what_chance_alone_makes_of_that_error():
    """In 1,000 runs all predictions are right; the standard error of their mean is 2 %."""
    rng, run = np.random.default_rng(0), run_of(1.0)
    drafted, chance = np.array([90, 60]), np.array([0.7, 0.3])
    errors = []
    for survived in rng.binomial(drafted, chance, (1000, 2)):
        run.survival = np.array([drafted, drafted * chance, survived])
        errors.append(survival_error([run]))
    assert expected_survival_error([run]) == pytest.approx(np.mean(errors), rel=0.1)
    run.survival = np.array([drafted, drafted * chance, drafted * (chance + 0.2)])
    assert survival_error([run]) > 4 * expected_survival_error([run]), (
        "wrong predictions are noticed"
    )
    assert expected_survival_error([run_of(1.0)]) is None


def test_a_mix_takes_both_kinds_in_turn():
    model = demo_paths()[0]
    fresh, edit, mix = (make_prompts(name, model) for name in ("fresh", "edit", "mix"))
    assert mix[0:6:2] == fresh[:3] and mix[1:6:2] == edit[:3]
    assert {*map(tuple, mix)} == {*map(tuple, fresh), *map(tuple, edit)}


def test_a_loop_stays_full_and_counts_what_comes_out():
    options = EngineOptions(lookahead="fixed:3", max_num_seqs=2, max_model_len=128)
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


@pytest.mark.parametrize(("way", "same"), [("coupled", True), ("rejection", False)])
def test_requests_are_sampled_as_asked_each_with_a_seed_of_its_own(way, same):
    """Texts of two loops are the same where the noise alone decides them, at any k."""
    params, texts_by_loop = SamplingParams(temperature=1.0, ignore_eos=True, verification=way), []
    for lookahead in ("off", "fixed:3"):
        options = EngineOptions(lookahead=lookahead, max_num_seqs=2, max_model_len=128)
        engine, _ = load_engine(*demo_paths(), options)
        prompts = [prompt[:20] for prompt in make_prompts("fresh", demo_paths()[0])[:5]]
        loop, texts = EndlessLoop(engine, prompts, 2, 12, params), {}
        step = engine.step

        def noted(step=step, texts=texts):
            outputs = step()
            for output in outputs:
                texts.setdefault(output.request_id, []).extend(output.token_ids)
            return outputs

        engine.step = noted
        loop.start()
        loop.run(60)
        texts_by_loop.append([texts[f"request-{i}"][:8] for i in range(3)])
    assert (texts_by_loop[0] == texts_by_loop[1]) == same
    assert texts_by_loop[0][0] != texts_by_loop[0][1]


def test_randomised_drafts_are_hardly_ever_accepted():
    options = EngineOptions(lookahead="fixed:3", max_num_seqs=2, max_model_len=128)
    engine, _ = load_engine(*demo_paths(), options)
    prompts = [prompt[:20] for prompt in make_prompts("fresh", demo_paths()[0])[:5]]
    acceptances = []
    for randomised in (True, False):
        with randomised_drafts() if randomised else nullcontext():
            loop = EndlessLoop(engine, prompts, 2, 40)
            loop.start()
            acceptances.append(loop.run(400).speculation.acceptance)
            loop.stop()
    assert acceptances[0] < 0.25 < 0.5 < acceptances[1], acceptances


def test_a_plot_is_a_picture(tmp_path):
    panels = {"fresh": {"off": [(1, 1.0), (2, 1.0)], "adaptive": [(1, 1.5), (2, 1.2)]}}
    path = tmp_path / "new" / "plot.png"
    save_lines(path, panels, x_label="load", y_label="speed", highlight="adaptive")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_questions_for_a_chat_model_name_what_they_ask_for():
    assert {len({*CHATS[kind]}) for kind in ("questions", "stories", "renames")} == {24}
    assert len({*CHATS["both"]}) == 48
    for text in CHATS["renames"]:
        _, old, _, new, _ = text.split("`", 4)
        code = text.split("```")[1]
        assert re.search(rf"\b{old}\b", code) and not re.search(rf"\b{new}\b", code), text
