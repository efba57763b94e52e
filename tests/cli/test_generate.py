"""`cbatch generate`: prompts and their results; runs that are stopped and resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch import SamplingParams
from cbatch.cli.main import main
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


# --- lines of the input --------------------------------------------------------------------------


GOOD = b'{"prompt": "def f():", "max_tokens": 4}'


def line_with(field: str, value: bytes) -> bytes:
    return b'{"prompt": "a", "%s": %s}' % (field.encode(), value)


BAD_LINES: tuple[tuple[bytes, str], ...] = (  # line, and the error's words
    (b'{"prompt": "\\ud800 x"}', "prompt: character 0 is half of a"),
    (line_with("id", b'"a\\udc00"'), "id: character 1 is half of a surrogate"),
    (line_with("stop", b'["b", "\\ud800"]'), "stop[1]: character 0 is half of a"),
    (line_with("structured_outputs", b'{"regex": "\\ud800"}'), "structured_outputs: "),
    (line_with("\\\\ud800", b"1"), "is not a known field"),
    (b'{"prompt": ' + b"[" * 100_000, "line: is nested too deeply"),
    (b'{"prompt": %s}' % (b"[" * 900 + b"]" * 900), "prompt: [[[[["),
    (b'{"prompt": "\xff"}', "line: is not UTF-8 (invalid start byte at byte 12)"),
    (b"\0", "line: is not JSON"),
    (line_with("seed", b"9" * 5000), "line: is not JSON"),
    (line_with("max_tokens", b"9" * 400), "max_tokens: 999"),
    (b'{"prompt": [%s]}' % (b"9" * 400), "prompt: "),
    (line_with("temperature", b"1e999"), "temperature: inf"),
    (line_with("top_p", b"NaN"), "top_p: nan"),
    (line_with("stop", b"{}"), "stop: {} is not allowed"),
    (b'{"prompt": "%s"}' % (b"ab" * 400_000), "prompt resulted in at least"),
    (line_with("id", b"[%s]" % (b"1," * 10**5 + b"1")), "id: [1, 1, "),
    (line_with("banned_token_ids", b"[%s]" % (b"1," * 10**5 + b"1")), "has 100001 ids"),
)


def generate(cbatch: Command, folder: Path, content: bytes, *more: Any) -> list[dict[str, Any]]:
    """Run the command, and return the results by index."""
    (folder / "in.jsonl").write_bytes(content)
    output = folder / "out.jsonl"
    run = cbatch("generate", "--input", folder / "in.jsonl", "--output", output, *more)
    assert run.status == 0, run.err
    rows = [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
    return sorted(rows, key=lambda row: row["index"])


def test_only_bad_lines_end_with_an_error(cbatch: Command, tmp_path: Path) -> None:
    """Good lines do not fail because of other lines, or when the run is resumed."""
    lines = [GOOD, *(line for line, _ in BAD_LINES), GOOD]
    content = b"\r\n".join(lines)
    rows = generate(cbatch, tmp_path, content)
    for row in (rows[0], rows[-1]):
        assert row["error"] is None and len(row["choices"][0]["token_ids"]) == 4
    for number, (bad, (_, words)) in enumerate(zip(rows[1:-1], BAD_LINES, strict=True), start=2):
        assert bad["choices"] == [] and bad["error"].startswith(f"line {number}: "), words
        assert words in bad["error"] and len(bad["error"]) < 1200, words
    assert generate(cbatch, tmp_path, content, "--resume") == rows


def test_byte_order_marks_and_line_ends_are_removed(cbatch: Command, tmp_path: Path) -> None:
    """A byte order mark is removed, also in the middle of concatenated files."""
    mark, end = b"\xef\xbb\xbf", b"\r\n"
    rows = generate(cbatch, tmp_path, end.join((mark + GOOD, b" \t", mark + GOOD)))
    assert [len(row["choices"][0]["token_ids"]) for row in rows] == [4, 4]
    (tmp_path / "in.txt").write_bytes(end.join((mark + b"one", b"", b"t\xffo", mark + b"three")))
    run = cbatch("generate", "--input", tmp_path / "in.txt", "--max-tokens", 3)
    *lines, _ = run.lines
    results = {row["index"]: (row["prompt"], row["error"]) for row in lines}
    assert results[0] == ("one", None) and results[2] == ("three", None)
    assert results[1] == ("", "line 3: line: is not UTF-8 (invalid start byte at byte 1)")


def test_an_argument_that_is_not_utf_8_ends_only_its_own_prompt(cbatch: Command) -> None:
    """Python represents bytes from the shell that are not UTF-8 as lone surrogates."""
    run = cbatch("generate", "def f():", "\udcff", "--max-tokens", 3)
    *lines, _ = run.lines
    good, bad = sorted(lines, key=lambda row: row["index"])
    assert good["error"] is None and good["choices"]
    assert bad["prompt"] == "\udcff" and bad["error"].startswith("prompt: character 0 is half")


# --- resumed runs --------------------------------------------------------------------------------


NUM_LINES = 12


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": "def", "temperature": 1.0, "max_tokens": 8} for _ in range(NUM_LINES)]
    lines[3]["seed"] = 5  # a seed of its own
    lines[7] |= {"stop": ["zz"], "banned_token_ids": [3, 4], "logit_bias": {"5": 1}}
    lines[5]["colour"] = 1  # an unknown field
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def tokens_of(path: Path) -> dict[int, Any]:
    """Return the tokens by index. Check that every line occurs once."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert sorted(row["index"] for row in rows) == list(range(NUM_LINES))
    return {row["index"]: (row["seed"], row["choices"] and tokens_by_choice(row)) for row in rows}


def tokens_by_choice(row: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in row["choices"]]


def interrupted(lines: list[bytes]) -> list[bytes]:
    return lines[:5]


def failed(lines: list[bytes]) -> list[bytes]:
    """Return the results of an engine that cannot be kept running."""
    row = json.loads(lines[4]) | {"choices": [], "error": "the executor failed 3 times in a row"}
    return [*lines[:4], json.dumps(row).encode() + b"\n", *lines[5:9]]


def cut(lines: list[bytes]) -> list[bytes]:
    return [*failed(lines), lines[9][:20]]


@pytest.mark.parametrize("left", [interrupted, failed, cut])
def test_a_resumed_run_equals_an_uninterrupted_run(
    cbatch: Command,
    tmp_path: Path,
    source: Path,
    left: Callable[[list[bytes]], list[bytes]],
) -> None:
    def run(output: Path, *more: Any) -> Run:
        command = ("generate", "--input", source, "--engine-seed", 7, "-n", 2, "--output", output)
        done = cbatch(*command, *more)
        assert done.status == 0, done.err
        return done

    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run(whole, "--max-num-seqs", 4)
    part.write_bytes(b"".join(left(whole.read_bytes().splitlines(keepends=True))))
    left_lines = part.read_bytes().splitlines()
    kept = [line for line in left_lines if b"3 times" not in line and line.endswith(b"}")]
    done = run(part, "--max-num-seqs", 3, "--resume")
    assert tokens_of(part) == tokens_of(whole)
    seeds = [seed for seed, _ in tokens_of(whole).values() if seed is not None]
    assert len(set(seeds)) == NUM_LINES - 1, "and no two lines have the same seed"
    assert part.read_bytes().splitlines()[: len(kept)] == kept, "earlier results were changed"
    assert ("1 failed and will rerun" in done.out) == (left in (failed, cut))
    assert not list(tmp_path.glob("*.part"))


def test_sampled_text_is_the_same_however_the_run_is_interrupted(tmp_path: Path) -> None:
    """Measured prices decide the number of drafts, which must not change a token."""
    source, outputs = tmp_path / "in.jsonl", [tmp_path / f"{i}.jsonl" for i in range(2)]
    line = {"prompt": "def", "temperature": 1.0, "max_tokens": 6, "n": 2}
    source.write_text((json.dumps(line) + "\n") * NUM_LINES, encoding="utf-8")
    command = ["generate", "--input", str(source), "--engine-seed", "7", "--no-progress"]
    more = ["--lookahead", "fixed:6", "--max-num-seqs", "8"]
    assert main([*command, "--output", str(outputs[0]), *more]) == 0
    whole = outputs[0].read_bytes().splitlines(keepends=True)
    outputs[1].write_bytes(b"".join(whole[4:9]))
    more = ["--max-num-seqs", "5", "--lookahead", "off", "--resume"]
    assert main([*command, "--output", str(outputs[1]), *more]) == 0
    texts = tokens_of(outputs[0])
    assert tokens_of(outputs[1]) == texts
    assert len({str(tokens) for _, tokens in texts.values()}) > NUM_LINES / 2


# --- a process that is stopped -------------------------------------------------------------------


ROOT = Path(__file__).parent.parent.parent
NUM_PROMPTS = 30

# `cbatch` with an engine without a model. Its steps are slow, and later steps are so long that a
# test that waits for the first lines can stop the process in time.
SLOW_CBATCH = """
import signal, sys, time
from cbatch.cli import generate
from cbatch.cli.main import main
from tests.checking.executor import SimExecutor
from tests.cli.conftest import INFO
from tests.toy_engine import make_engine

run = SimExecutor.run
steps = iter([0.02] * 12)
def slow(executor, plan):
    time.sleep(next(steps, 2))
    return run(executor, plan)

SimExecutor.run = slow
sizes = {"num_blocks": 512, "max_model_len": 600, "block_size": 8}
generate.load_engine = lambda model, draft, options: (make_engine(max_num_seqs=3, **sizes), INFO)
# Whoever runs the tests in the background may have handed down that it be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def test_a_stopped_run_is_resumed(cbatch: Callable[..., Run], tmp_path: Path) -> None:
    prompts = [{"prompt": f"def f{i}(", "max_tokens": 8, "seed": i} for i in range(NUM_PROMPTS)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    command = ["generate", "--input", str(source), "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_CBATCH, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        while len(lines_of(output)) < 4:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        errors, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume" in errors
    before = lines_of(output)
    assert 4 <= len(before) < NUM_PROMPTS, "it was not stopped during its work"
    assert cbatch(*command, "--resume").status == 0
    after = lines_of(output)
    assert after[: len(before)] == before
    assert sorted(line["index"] for line in after) == list(range(NUM_PROMPTS))
    undisturbed = tmp_path / "whole.jsonl"
    cbatch("generate", "--input", source, "--output", undisturbed)

    def tokens(lines: list[dict[str, Any]]) -> dict[int, list[int]]:
        return {line["index"]: line["choices"][0]["token_ids"] for line in lines}

    assert tokens(after) == tokens(lines_of(undisturbed))
