"""Benchmarks of lookahead: prompts, the closed loop, statistics."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from bench import lookahead as bench
from bench.lookahead import (
    EndlessLoop,
    PolicyRun,
    make_prompts,
    randomised_drafts,
    rows_of,
)
from cbatch import EngineOptions, load_engine
from cbatch.demo import demo_paths
from cbatch.text.outputs import Speculation


@pytest.fixture(scope="module")
def engines():
    return {
        policy: load_engine(
            *demo_paths(), EngineOptions(lookahead=policy, max_num_seqs=2, max_model_len=128)
        )[0]
        for policy in ("off", "fixed:3")
    }


@pytest.fixture(scope="module")
def prompts():
    return [prompt[:20] for prompt in make_prompts("fresh", demo_paths()[0])[:5]]


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


def test_a_mix_takes_both_kinds_in_turn():
    model = demo_paths()[0]
    fresh, edit, mix = (make_prompts(name, model) for name in ("fresh", "edit", "mix"))
    assert mix[0:6:2] == fresh[:3] and mix[1:6:2] == edit[:3]
    assert {*map(tuple, mix)} == {*map(tuple, fresh), *map(tuple, edit)}


def test_a_loop_stays_full_and_counts_what_comes_out(engines, prompts):
    engine = engines["fixed:3"]
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
    assert all(loop.run(1).tokens for _ in range(5)), "a step gives more than such a turn needs"
    loop.stop()
    assert not engine.has_work


def test_cells_before_a_failure_are_printed(monkeypatch, capsys):
    def measure(engines, prompts, concurrency, *_):
        if concurrency == 2:
            raise RuntimeError("out of memory")
        return {policy: [run_of(10.0)] for policy in engines}

    monkeypatch.setattr(bench, "build", lambda *_: None)
    monkeypatch.setattr(bench, "measure", measure)
    command = ["x", "--workload", "fresh", "--batch", "1", "2", "4", "--policy", "off"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match="fresh, batch 2"):
        bench.main()
    out, err = capsys.readouterr()
    assert [row["batch"] for row in json.loads(out.splitlines()[-1])["results"]] == [1]
    assert "fresh, batch 2 failed: out of memory" in err


def test_randomised_drafts_are_hardly_ever_accepted(engines, prompts):
    acceptances = []
    for randomised in (True, False):
        with randomised_drafts() if randomised else nullcontext():
            loop = EndlessLoop(engines["fixed:3"], prompts, 2, 40)
            loop.start()
            acceptances.append(loop.run(400).speculation.acceptance)
            loop.stop()
    assert acceptances[0] < 0.25 < 0.5 < acceptances[1], acceptances


def test_a_time_budget_replaces_cycles(engines, prompts, capsys, monkeypatch):
    monkeypatch.setattr(bench, "build", lambda policy, _: engines[policy])
    monkeypatch.setattr(bench, "make_prompts", lambda *_: prompts)
    command = "x --workload fresh --batch 1 --policy off fixed:3 --seconds 0.2 --output-tokens 8"
    monkeypatch.setattr("sys.argv", command.split())
    bench.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["policy"] for row in rows] == ["off", "fixed:3"]
    assert all(row["ratio_to_off_low95"] is not None for row in rows), "two cycles at least"


def test_a_policy_names_its_drafter():
    args = bench.parse(["--batch", "1", "--drafter", "ngram"])
    for policy, drafter in (("fixed:1", "ngram"), ("fixed:1@suffix", "suffix")):
        assert bench.build(policy, args).core.scheduler.config.default_chain == (drafter,)
