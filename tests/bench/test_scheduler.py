from __future__ import annotations

import json

import pytest

from bench import report
from bench import scheduler as bench


def test_prints_a_table_and_then_one_json_line(capsys, monkeypatch):
    argv = ["bench.scheduler", "--running", "2", "4", "--steps", "5", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", argv)
    bench.main()
    *table, last = capsys.readouterr().out.strip().split("\n")
    assert any("us_per_step_p50" in line for line in table)
    document = json.loads(last)
    assert [(r["running"], r["k"], r["enable_prefix_caching"]) for r in document["results"]] == [
        (running, k, cache) for running in (2, 4) for k in (0, 4) for cache in (False, True)
    ]
    for row in document["results"]:
        assert 0 < row["us_per_step_p50"] <= row["us_per_step_p99"]
    assert document["machine"]["cores"] >= 1 and "numpy" in document["versions"]


@pytest.mark.parametrize(("k", "enable_prefix_caching"), [(0, False), (4, True)])
def test_steady_state_is_what_it_says(k, enable_prefix_caching):
    scheduler, executor = bench.steady_state(4, k, enable_prefix_caching)
    before = scheduler.stats.emitted_tokens, scheduler.stats.accepted_tokens
    for _ in range(200):
        _, plan = bench.step(scheduler, executor)
        assert plan.query_lens.tolist() == [1 + k] * 4
    emitted = scheduler.stats.emitted_tokens - before[0]
    accepted = scheduler.stats.accepted_tokens - before[1]
    assert emitted == accepted + 4 * 200
    expected = sum(bench.ACCEPTANCE**j for j in range(1, k + 1))
    assert accepted / 800 == pytest.approx(expected, abs=0.25)
    assert scheduler.num_running == 4


def test_cells_of_a_table_are_readable_and_empty_columns_left_out(capsys):
    rows = [
        {"a": None, "b": True, "c": 1.23456, "none": None},
        {"a": 7, "b": 1, "c": 1, "none": None},
    ]
    report.print_report("t", rows)
    out = capsys.readouterr().out
    assert "-" in out and "yes" in out and "1.235" in out
    assert out.count("none") == 2, "in the JSON line alone"
