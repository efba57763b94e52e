"""`cbatch generate --input`: only the bad line ends with an error, which names the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

Command = Callable[..., Run]
GOOD = b'{"prompt": "def f():", "max_tokens": 4}'
HUGE = b"9" * 400


def line_with(field: str, value: bytes) -> bytes:
    return b'{"prompt": "a", "%s": %s}' % (field.encode(), value)


BAD_LINES: dict[str, tuple[bytes, str]] = {
    # name: (line, the error's words)
    "half a pair in the prompt": (b'{"prompt": "\\ud800 x"}', "prompt: character 0 is half of a"),
    "half a pair in the id": (
        line_with("id", b'"a\\udc00"'),
        "id: character 1 is half of a surrogate",
    ),
    "half a pair in a stop": (
        line_with("stop", b'["b", "\\ud800"]'),
        "stop[1]: character 0 is half of a",
    ),
    "half a pair in a grammar": (
        line_with("structured_outputs", b'{"regex": "\\ud800"}'),
        "structured_outputs: ",
    ),
    "half a pair as a schema's key": (
        line_with("structured_outputs", b'{"json": {"\\ud800": 1}}'),
        "structured_outputs: ",
    ),
    "half a pair in a name": (line_with("\\\\ud800", b"1"), "is not a known field"),
    "a nest without an end": (b'{"prompt": ' + b"[" * 100_000, "line: is nested too deeply"),
    "a nest": (b'{"prompt": %s}' % (b"[" * 900 + b"]" * 900), "prompt: [[[[["),
    "a nest as a schema": (
        line_with("structured_outputs", b'{"json": %s}' % (b'{"a":' * 900 + b"1" + b"}" * 900)),
        "",
    ),
    "no UTF-8": (b'{"prompt": "\xff"}', "line: is not UTF-8 (invalid start byte at byte 12)"),
    "NUL alone": (b"\0", "line: is not JSON"),
    "two objects": (GOOD + GOOD, "line: is not JSON"),
    "many digits": (line_with("seed", b"9" * 5000), "line: is not JSON"),
    "a huge seed": (line_with("seed", HUGE), "seed: 999"),
    "a huge length": (line_with("max_tokens", HUGE), "max_tokens: 999"),
    "a length beyond int32": (line_with("max_tokens", b"2147483648"), "max_tokens: 2147483648"),
    "a huge n": (line_with("n", b"1000000000"), "n: 1000000000 is not allowed"),
    "a huge token id": (b'{"prompt": [%s]}' % HUGE, "prompt: "),
    "a huge id of a bias": (line_with("logit_bias", b'{"%s": 1}' % HUGE), "logit_bias: "),
    "infinity": (line_with("temperature", b"1e999"), "temperature: inf"),
    "NaN": (line_with("top_p", b"NaN"), "top_p: nan"),
    "another type": (line_with("stop", b"{}"), "stop: {} is not allowed"),
    "a long unknown name": (line_with("a" * 100_000, b"1"), "aaaa"),
    "a long prompt": (
        b'{"prompt": "%s"}' % (b"ab" * 4_000_000),
        "prompt resulted in at least",
    ),
    "a long value": (line_with("id", b"[%s]" % (b"1," * 10**6 + b"1")), "id: [1, 1, "),
    "a long list": (
        line_with("banned_token_ids", b"[%s]" % (b"1," * 10**5 + b"1")),
        "has 100001 ids",
    ),
}


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
    lines = [GOOD, *(line for line, _ in BAD_LINES.values()), GOOD]
    content = b"\r\n".join(lines)
    rows = generate(cbatch, tmp_path, content)
    for row in (rows[0], rows[-1]):
        assert row["error"] is None and len(row["choices"][0]["token_ids"]) == 4
    for number, (bad, (name, (_, words))) in enumerate(
        zip(rows[1:-1], BAD_LINES.items(), strict=True), start=2
    ):
        assert bad["choices"] == [] and bad["error"].startswith(f"line {number}: "), name
        assert words in bad["error"] and len(bad["error"]) < 1200, name
    assert generate(cbatch, tmp_path, content, "--resume") == rows


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_byte_order_marks_and_line_ends_are_removed(
    cbatch: Command, tmp_path: Path, end: bytes
) -> None:
    """A byte order mark is removed, also in the middle of concatenated files."""
    mark = b"\xef\xbb\xbf"
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
