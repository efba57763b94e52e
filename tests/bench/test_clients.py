"""How the figures of other load testers are asked for, read and put beside ours."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.clients import (
    Figures,
    Run,
    Tool,
    compare,
    guidellm_command,
    main,
    measure,
    read_guidellm,
    read_vllm,
    vllm_command,
)
from tests.server.http_client import serving
from tests.toy_engine import make_engine

VLLM = {
    "total_output_tokens": 512,
    "output_throughput": 50.0,
    "median_ttft_ms": 20.0,
    "median_tpot_ms": 4.0,
}
# Its own words for what others call TPOT; and its TPOT, which is another thing.
GUIDELLM = {
    "output_token_count": {"successful": {"total_sum": 512}},
    "output_tokens_per_second": {"successful": {"mean": 50.0}},
    "time_to_first_token_ms": {"successful": {"median": 20.0}},
    "inter_token_latency_ms": {"successful": {"median": 4.0}},
    "time_per_output_token_ms": {"successful": {"median": 9.0}},
}


@pytest.fixture
def program(tmp_path: Path) -> Callable[[Any], str]:
    """A program that writes this document where it is told to, in vLLM's way or guidellm's."""

    def make(document: Any) -> str:
        path = tmp_path / "program"
        path.write_text(
            f"#!{sys.executable}\n"
            "import sys\n"
            "words = dict(zip(sys.argv[1:], sys.argv[2:]))\n"
            "if '--output' in words:\n"
            "    path = words['--output'].removeprefix('kind=json,path=')\n"
            "else:\n"
            "    path = words['--result-dir'] + '/' + words['--result-filename']\n"
            f"open(path, 'w').write({json.dumps(document)!r})\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture
def run(tmp_path: Path) -> Run:
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    return Run("http://host:1", "m", tmp_path, prompts, 4, 64, 8, result)


def test_their_documents_are_read(program: Callable[[Any], str], run: Run) -> None:
    expected = Figures(512, 50.0, 20.0, 4.0)
    vllm = Tool("vllm", partial(vllm_command, program(VLLM)), read_vllm)
    assert measure(vllm, run) == expected and not run.result.exists()
    document = {"benchmarks": [{"metrics": GUIDELLM}]}
    guidellm = Tool("guidellm", partial(guidellm_command, program(document)), read_guidellm)
    assert measure(guidellm, run) == expected


def test_a_tool_that_lost_tokens_or_failed_is_not_compared(
    program: Callable[[Any], str], run: Run
) -> None:
    short = partial(vllm_command, program(VLLM | {"total_output_tokens": 511}))
    with pytest.raises(RuntimeError, match="511 tokens, 512 were due"):
        measure(Tool("vllm", short, read_vllm), run)
    with pytest.raises(RuntimeError, match="vllm failed"):
        measure(Tool("vllm", lambda _: [sys.executable, "-c", "exit(3)"], read_vllm), run)


def test_ratios_are_taken_within_a_repeat(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """The machine gets faster, and once in the middle of a repeat: the medians of each tool by
    itself would make that a ratio of 2.2."""
    order: list[str] = []
    speeds = iter([1.0, 1.0, 2.0, 2.0, 8.0, 1.0])

    def measured(tool: Tool, _: Run) -> Figures:
        order.append(tool.name)
        speed = next(speeds) * (1.1 if tool.name == "a" else 1.0)
        return Figures(512, 100 * speed, 30 / speed, 3 / speed)

    monkeypatch.setattr("bench.clients.measure", measured)
    rows = compare([Tool(name, lambda _: [], read_vllm) for name in "ab"], run, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert rows[1]["ours_tokens_per_s"] == 1.1 and rows[1]["ours_ttft"] == 0.909
    assert rows[1]["output_tokens_per_s"] == 100.0 and rows[0]["ours_tpot"] is None


def test_ours_beside_another(
    program: Callable[[Any], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {"num_blocks": 512, "max_model_tokens": 600, "block_size_tokens": 8}
    sized = ["--prompt-tokens", "20", "--output-tokens", "8", "--streams", "4", "--repeats", "1"]
    with serving(make_engine(max_slots=8, **sizes)) as client:
        main([f"http://127.0.0.1:{client.port}", "--vllm", program(VLLM), *sized])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, theirs = document["results"]
    assert (ours["tool"], theirs["tool"]) == ("cbatch bench", "vllm bench serve")
    assert theirs["output_tokens_per_s"] == 50.0 and ours["ours_ttft"] is None
    assert theirs["ours_tokens_per_s"] == pytest.approx(ours["output_tokens_per_s"] / 50, rel=0.01)
