"""The server of set times, read by our own load tester."""

from __future__ import annotations

import json
from pathlib import Path

from bench.paced import FIRST_S, GAP_S, MODEL, paced_server
from cbatch.cli.main import main

TOKENS = 6


def test_no_token_comes_before_it_is_due(tmp_path: Path) -> None:
    prompts, records = tmp_path / "prompts.txt", tmp_path / "records.jsonl"
    prompts.write_text("a\nb\n")
    report = tmp_path / "report.json"
    with paced_server() as url:
        words = ["bench", url, "--quiet", "--prompts", str(prompts), "--ignore-eos"]
        words += ["--output-tokens", str(TOKENS), "--concurrency", "3", "--requests", "7"]
        assert main([*words, "--json", str(report), "--records", str(records)]) == 0
    told = json.loads(report.read_bytes())
    assert (told["requests"], told["output_tokens"]) == (7, 7 * TOKENS)
    assert told["settings"]["model"] == MODEL
    for line in records.read_bytes().splitlines():
        record = json.loads(line)
        assert record["ttft_s"] >= FIRST_S
        assert record["e2e_s"] >= FIRST_S + (TOKENS - 1) * GAP_S
        assert record["output_tokens"] == TOKENS == record["chunks"]
