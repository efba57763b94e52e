"""How the figures of another load tester are asked for, read and put beside ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.load.run.stub import Pace, stub_server
from bench.server.load_testers import OURS, VLLM, Figures, main, rows_of
from cbatch.cli.main import main as cbatch
from tests.server.http_client import serving
from tests.toy_engine import make_engine

TOLD = {
    "total_output_tokens": 512,
    "output_throughput": 50.0,
    "median_ttft_ms": 20.0,
    "median_tpot_ms": 4.0,
}


def program(folder: Path, told: dict[str, Any]) -> str:
    """That writes this document where it is told to."""
    path = folder / "program"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "words = dict(zip(sys.argv[1:], sys.argv[2:]))\n"
        "path = words['--result-dir'] + '/' + words['--result-filename']\n"
        f"open(path, 'w').write({json.dumps(told)!r})\n"
    )
    path.chmod(0o755)
    return str(path)


def test_ratios_are_taken_within_a_repeat() -> None:
    """The machine gets faster, and once in the middle of a repeat: the medians of each tool by
    itself would make that a ratio of 2.2."""
    mine, others = (
        [Figures(512, 100 * speed * s, 30 / speed / s, 3 / speed / s) for s in speeds]
        for speed, speeds in ((1.1, (1.0, 2.0, 8.0)), (1.0, (1.0, 2.0, 1.0)))
    )
    ours, theirs = rows_of(4, {OURS: mine, VLLM: others})
    assert theirs["ours_tokens_per_s"] == 1.1 and theirs["ours_ttft"] == 0.909
    assert theirs["output_tokens_per_s"] == 100.0 and ours["ours_tpot"] is None


def test_ours_beside_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_blocks": 512, "max_model_tokens": 600, "block_size_tokens": 8}
    sized = ["--prompt-tokens", "20", "--output-tokens", "8", "--streams", "4", "--repeats", "1"]
    with serving(make_engine(max_slots=8, **sizes)) as client:
        url = f"http://127.0.0.1:{client.port}"
        main([url, "--vllm", program(tmp_path, TOLD), *sized])
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        with pytest.raises(RuntimeError, match="511 tokens, 512 were due"):
            short = TOLD | {"total_output_tokens": 511}
            main([url, "--vllm", program(tmp_path, short), *sized])
        with pytest.raises(RuntimeError, match="vllm bench serve failed"):
            main([url, "--vllm", "false", *sized])
    ours, theirs = document["results"]
    assert (ours["tool"], theirs["tool"]) == (OURS, VLLM)
    assert theirs["output_tokens_per_s"] == 50.0 and ours["ours_ttft"] is None
    assert theirs["ours_tokens_per_s"] == pytest.approx(ours["output_tokens_per_s"] / 50, rel=0.01)


def test_no_token_comes_before_it_is_due(tmp_path: Path) -> None:
    prompts, records = tmp_path / "prompts.txt", tmp_path / "records.jsonl"
    prompts.write_text("a\nb\n")
    report, pace = tmp_path / "report.json", Pace()
    with stub_server(pace) as endpoint:
        words = ["bench", endpoint.url, "--quiet", "--prompts", str(prompts), "--ignore-eos"]
        words += ["--output-tokens", "6", "--concurrency", "3", "--requests", "7"]
        assert cbatch([*words, "--json", str(report), "--records", str(records)]) == 0
    told = json.loads(report.read_bytes())
    assert (told["requests"], told["output_tokens"]) == (7, 7 * 6)
    for record in map(json.loads, records.read_bytes().splitlines()):
        assert record["ttft_s"] >= pace.first_s
        assert record["e2e_s"] >= pace.first_s + 5 * pace.gap_s
        assert record["output_tokens"] == 6 == record["chunks"]
