"""Benchmarks of the scheduler, the pictures of the README, and the report of every benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import pictures, report
from bench import scheduler as bench


def test_prints_a_table_and_then_one_json_line(capsys: Any, monkeypatch: Any) -> None:
    argv = ["bench.scheduler", "--running", "3", "--steps", "5", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr(bench, "WARM_UP_STEPS", 3)
    monkeypatch.setattr("gc.collect", lambda: 0)  # which takes a second
    bench.main()
    *table, last = capsys.readouterr().out.strip().split("\n")
    assert any("us_per_step_p50" in line for line in table)
    document = json.loads(last)
    assert [(r["running"], r["k"], r["enable_prefix_caching"]) for r in document["results"]] == [
        (3, k, cache) for k in (0, 4) for cache in (False, True)
    ]
    for row in document["results"]:
        assert 0 < row["us_per_step_p50"] <= row["us_per_step_p99"]
    assert document["machine"]["cores"] >= 1 and "numpy" in document["versions"]


@pytest.mark.parametrize(("k", "enable_prefix_caching"), [(0, False), (4, True)])
def test_steady_state_is_what_it_says(k: int, enable_prefix_caching: bool) -> None:
    scheduler, executor = bench.steady_state(4, k, enable_prefix_caching)
    before = scheduler.stats.emitted_tokens, scheduler.stats.accepted_tokens
    for _ in range(200):
        _, plan = bench.step(scheduler, executor)
        assert plan.query_lens.tolist() == [1 + k] * 4
    emitted = scheduler.stats.emitted_tokens - before[0]
    accepted = scheduler.stats.accepted_tokens - before[1]
    assert emitted == accepted + 4 * 200 and scheduler.num_running == 4
    expected = sum(bench.ACCEPTANCE**j for j in range(1, k + 1))
    assert accepted / 800 == pytest.approx(expected, abs=0.25)


def test_cells_of_a_table_are_readable_and_empty_columns_left_out(capsys: Any) -> None:
    rows = [
        {"a": None, "b": True, "c": 1.23456, "none": None},
        {"a": 7, "b": 1, "c": 1, "none": None},
    ]
    report.print_report("t", rows)
    out = capsys.readouterr().out
    assert "-" in out and "yes" in out and "1.235" in out
    assert out.count("none") == 2, "in the JSON line alone"


def test_the_plot_of_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statements about the default are true."""
    monkeypatch.setattr(pictures, "CLIENTS", (4,))
    monkeypatch.setattr(pictures, "REQUESTS", 12)
    path = tmp_path / "policies.png"
    rows = {row["policy"]: row for row in pictures.save_policies(path)}
    assert path.read_bytes().startswith(b"\x89PNG")
    assert rows["adaptive"]["4"] == max(row["4"] for row in rows.values()) > 1


def test_the_plot_of_other_engines_shows_the_figures_of_the_document(tmp_path: Path) -> None:
    llama, vllm = (
        pictures.ratios_in_docs("### llama.cpp", "F"),
        pictures.ratios_in_docs("### vLLM", "F"),
    )
    assert llama["SmolLM2-135M Q4_1"][:3] == [3.68, 5.96, 5.37] and len(llama) == 4
    assert vllm["cbatch"][:5] == [1.91, 1.75, 1.54, 1.38, 1.26]
    pictures.save_peers(tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
