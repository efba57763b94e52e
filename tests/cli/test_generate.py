from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch import SamplingParams
from cbatch.llm import complete_all
from tests.cli.conftest import Run
from tests.toy_engine import make_engine

Command = Callable[..., Run]
PROMPT = "def add(a, b):"


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(prompt: str = PROMPT, **params: Any) -> str:
    return complete_all(make_engine(), [prompt], [SamplingParams(temperature=0, **params)])[0].text


def write_jsonl(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_as_arguments_to_standard_output(cbatch: Command) -> None:
    run = cbatch("generate", PROMPT, "class A", "--max-tokens", 9, "--seed", 4)
    assert run.status == 0
    *lines, report = run.lines
    assert sorted(line["index"] for line in lines) == [0, 1]
    by_index = {line["index"]: line for line in lines}
    assert by_index[0]["choices"][0]["text"] == expected(max_tokens=9, seed=4)
    assert by_index[1]["prompt"] == "class A" and by_index[1]["seed"] == 4
    (result,) = report["results"]
    assert {"system", "lookahead", "batch", "dtype", "output_tokens_per_s"} < set(result)
    assert result["system"] == "cbatch" and result["batch"] == 2
    assert result["mean_accepted_tokens"] > 1
    assert report["machine"] and report["versions"]["python"]
    assert run.out.splitlines()[-1] == json.dumps(report), "the JSON line is the last"
    assert "batch_invariant: yes" in run.err and "mean accepted length" in run.err


def test_prompts_as_options(cbatch: Command) -> None:
    run = cbatch("generate", "one", "--prompt", "two", "-p", "three", "--prompt=-4", "-p5")
    by_index = {line["index"]: line["prompt"] for line in run.lines[:-1]}
    assert by_index == {0: "one", 1: "two", 2: "three", 3: "-4", 4: "5"}
    refused = cbatch("generate", "-p", "two", "--input", "x.txt")
    assert refused.status == 2 and "PROMPT: needs prompts or --input" in refused.err


def test_a_text_file_has_one_prompt_per_line(cbatch: Command, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("one\r\n\n  two\nthree", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    run = cbatch("generate", "--input", source, "--output", output, "--max-tokens", 3)
    assert run.status == 0
    assert {r["index"]: r["prompt"] for r in results(output)} == {0: "one", 1: "  two", 2: "three"}
    assert "Summary" in run.out and len(run.lines) == 1


def test_a_json_line_has_its_own_sampling(cbatch: Command, tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl",
        {"prompt": PROMPT, "max_tokens": 5, "id": "a"},
        {"prompt": PROMPT, "temperature": 0.5, "seed": 3, "n": 2, "stop": "zzz"},
        {"prompt": [5, 6, 7]},
    )
    output = tmp_path / "out.jsonl"
    cbatch("generate", "--input", source, "--output", output, "--max-tokens", 7)
    first, second, third = sorted(results(output), key=lambda r: r["index"])
    assert first["id"] == "a" and len(first["choices"][0]["token_ids"]) == 5
    assert second["params"]["temperature"] == 0.5 and second["params"]["stop"] == ["zzz"]
    assert [len(c["token_ids"]) for c in second["choices"]] == [7, 7]
    assert third["prompt"] == [5, 6, 7] and len(third["choices"][0]["token_ids"]) == 7


def test_a_file_is_neither_overwritten_nor_continued_with_other_prompts(
    cbatch: Command, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    cbatch("generate", PROMPT, "--output", output)
    before = output.read_bytes()
    for argv, words in (
        ((PROMPT,), "--output: .* exists"),
        (("other", "--resume"), "is the result of another prompt"),
        ((PROMPT, "--resume", "--max-tokens", 5), "is the result of another prompt or of other"),
    ):
        run = cbatch("generate", *argv, "--output", output)
        assert run.status == 2
        assert re.search(words, run.err), run.err
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        ((), "PROMPT"),
        ((PROMPT, "--input", "x.txt"), "PROMPT"),
        (("--input", "/nowhere/x.jsonl"), "--input"),
        ((PROMPT, "--resume"), "--resume"),
        ((PROMPT, "--lookahead", "fixed:99"), "--lookahead"),
        ((PROMPT, "--draft", "x"), "--draft"),
    ],
)
def test_bad_options_are_named(cbatch: Command, argv: tuple[str, ...], field: str) -> None:
    run = cbatch("generate", *argv)
    assert run.status == 2
    assert run.err.startswith(f"cbatch: {field}: "), run.err
