"""`cbatch generate --resume`: a resumed run has the same results as an uninterrupted run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import main
from cbatch.text.output_processor import seed_at
from tests.cli.conftest import Run

Command = Callable[..., Run]
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


def reordered(lines: list[bytes]) -> list[bytes]:
    return random.Random(1).sample(lines, 7)


def failed(lines: list[bytes]) -> list[bytes]:
    """Return the results of an engine that cannot be kept running."""
    row = json.loads(lines[4]) | {"choices": [], "error": "the executor failed 3 times in a row"}
    return [*lines[:4], json.dumps(row).encode() + b"\n", *lines[5:9]]


def cut(lines: list[bytes]) -> list[bytes]:
    return [*failed(lines), lines[9][:20]]


def saved_by_an_editor(lines: list[bytes]) -> list[bytes]:
    return [b"\xef\xbb\xbf" + lines[0].replace(b"\n", b"\r\n"), *lines[1:4]]


@pytest.mark.parametrize("left", [interrupted, reordered, failed, cut, saved_by_an_editor])
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


def test_seeds_depend_only_on_the_engines_seed_and_the_line(
    cbatch: Command, tmp_path: Path, source: Path
) -> None:
    seeds = {}
    for seed in (7, 8):
        output = tmp_path / f"{seed}.jsonl"
        cbatch("generate", "--input", source, "--engine-seed", seed, "--output", output)
        seeds[seed] = {index: drawn for index, (drawn, _) in tokens_of(output).items()}
        own = {3: 5, 5: None}
        assert seeds[seed] == {i: seed_at(seed, i) for i in range(NUM_LINES)} | own
    assert len({*seeds[7].values(), *seeds[8].values()} - {5, None}) == 2 * (NUM_LINES - 2)
    assert all(0 <= drawn < 2**53 for drawn in seeds[7].values() if drawn is not None)


def test_sampled_text_is_the_same_however_the_run_is_interrupted(tmp_path: Path) -> None:
    """Measured prices decide the number of drafts, which must not change a token."""
    source, outputs = tmp_path / "in.jsonl", [tmp_path / f"{i}.jsonl" for i in range(3)]
    line = {"prompt": "def", "temperature": 1.0, "max_tokens": 12, "n": 2}
    source.write_text((json.dumps(line) + "\n") * NUM_LINES, encoding="utf-8")
    command = ["generate", "--input", str(source), "--engine-seed", "7", "--no-progress"]
    for output, lookahead, slots in zip(outputs, ("adaptive", "fixed:6"), "83", strict=False):
        more = ["--lookahead", lookahead, "--max-num-seqs", slots]
        assert main([*command, "--output", str(output), *more]) == 0
    whole = outputs[0].read_bytes().splitlines(keepends=True)
    outputs[2].write_bytes(b"".join(whole[4:9]))
    more = ["--max-num-seqs", "5", "--lookahead", "off", "--resume"]
    assert main([*command, "--output", str(outputs[2]), *more]) == 0
    texts = tokens_of(outputs[0])
    assert tokens_of(outputs[1]) == texts and tokens_of(outputs[2]) == texts
    assert len({str(tokens) for _, tokens in texts.values()}) > NUM_LINES / 2
