"""Damaged step logs: `advise`, `sim` and `trace show` say which line is damaged, and never end in a
traceback or take gigabytes of memory."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import main
from cbatch.steplog.recorder import StepRecorder
from tests.helpers import World, make_config, make_request

MUTATIONS = 30
VALUES: list[Any] = [0, -1, 1, 7, 10**9, 2**31, 2**62, 1.5, 1e300, -1e300, None, "x", [], {}, True]
KINDS = ("lost", "doubled", "swapped", "cut", "bytes", "no field", *["value"] * 6)
GIB = 2**30


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("logs") / "whole.jsonl"
    config = make_config(num_blocks=24, lookahead="ema:3", max_num_seqs=4, drafter=("ngram",))
    with StepRecorder(path) as log:
        world = World(config, log=log)
        for i in range(9):
            world.add(make_request(f"r{i}", (*range(100, 112), i), seed=i, max_tokens=6 + i))
            world.step()
        world.scheduler.cancel("r8", world.clock())
        world.run()
    return path.read_bytes().split(b"\n")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from _places(inner, (*path, key))


def damaged(whole: list[bytes], seed: int) -> bytes:
    rng, lines = random.Random(seed), list(whole)
    for _ in range(rng.choice((1, 1, 2))):
        at, kind = rng.randrange(1, len(lines) - 1), rng.choice(KINDS)
        if kind == "lost":
            del lines[at]
        elif kind == "doubled":
            lines.insert(at, lines[at])
        elif kind == "swapped":
            lines[at], lines[at - 1] = lines[max(at - 1, 1)], lines[at]
        elif kind == "cut":
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif kind == "bytes":
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.randbytes(2) + lines[at][place + 2 :]
        else:
            try:
                record = json.loads(lines[at])
            except ValueError:
                continue
            *outer, last = rng.choice(list(_places(record)))
            inner = record
            for key in outer:
                inner = inner[key]
            if kind == "no field":
                del inner[last]
            else:
                inner[last] = rng.choice(VALUES)
            lines[at] = json.dumps(record).encode()
    return b"\n".join(lines)


COMMANDS = {
    "advise": ("--lookahead", "off,fixed:2", "--drafter", "ngram", "--processes", "1"),
    "sim": ("--gpu", "H100", "--model", "llama-3.1-8b"),
    "trace show": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_damage_is_one_line(
    command: str, lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    named = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(MUTATIONS):
        path.write_bytes(damaged(lines, seed))
        try:
            status = main([*command.split(), str(path), *COMMANDS[command]])
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        out, err = capsys.readouterr()
        assert status in (0, 2), seed
        if status == 2:
            assert err.count("\n") <= 2, (seed, err)
        named += f"{path}, line " in out + err
    assert named > MUTATIONS // 3
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < GIB


@pytest.mark.parametrize("size", ["num_blocks", "block_size", "max_num_seqs", "max_model_len"])
def test_huge_sizes(
    size: str, lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    record = json.loads(lines[1])
    record["config"] |= {size: 10**11, "max_num_batched_tokens": 10**12}
    path.write_bytes(b"\n".join([lines[0], json.dumps(record).encode(), *lines[2:]]))
    status = main(["trace", "show", str(path)])
    err = capsys.readouterr().err
    assert status == 0 or (status == 2 and "line 2" in err)
