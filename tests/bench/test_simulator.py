from __future__ import annotations

import json

import pytest

from bench import simulator


def test_prints_a_table_and_then_one_json_line(capsys, monkeypatch, tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},100,5\n" for i in range(9))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    monkeypatch.setattr("sys.argv", ["bench.simulator", str(trace), "--requests", "4"])
    monkeypatch.setattr(simulator, "start_up_s", lambda: 0.5)
    simulator.main()
    *table, last = capsys.readouterr().out.strip().split("\n")
    assert any("us_per_step" in line for line in table)
    (row,) = json.loads(last)["results"]
    assert (row["requests"], row["steps"], row["start_up_s"]) == (4, 20, 0.5)
    assert row["us_per_step"] > 0 and row["of_limit"] > 0


def test_made_up_requests_resemble_the_trace():
    """Means at 5 standard errors (once in 1.7 million seeds); cutting costs about a hundredth."""
    found = list(simulator.like_azure(2000))
    prompts = sum(r.prompt_tokens for r in found) / 2000
    outputs = sum(r.output_tokens for r in found) / 2000
    assert prompts == pytest.approx(1155, rel=0.02 + 5 * 0.96 / 2000**0.5)
    assert outputs == pytest.approx(211, rel=0.02 + 5 * 0.77 / 2000**0.5)
    assert found[-1].arrival_s == pytest.approx(2000 / 5.53, rel=5 / 2000**0.5)
