"""A trace that ends in the middle of a row, such as a download that broke off."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cbatch.cli.main import main
from sim.workload.traces.reader import Trace
from sim.workload.traces.request import TraceError

ROWS = [{"timestamp": 40 * i, "input_length": 1000, "output_length": 20 + i} for i in range(9)]
AZURE = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
AZURE += [f"2023-11-16 18:15:{10 + i}.5,{100 + i},{20 + i}" for i in range(9)]
CSV = "\n".join(AZURE).encode() + b"\n"
MOONCAKE = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CUT = {
    "JSON": (MOONCAKE[:-30], 9),
    "JSON, at its last brace": (MOONCAKE[:-2], 9),
    "CSV": (CSV[:-15], 10),
    "gzip": (gzip.compress(MOONCAKE * 200)[:-40], None),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_whole_is_used(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, line = CUT[name]
    path = tmp_path / f"{name[:3]}.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        list(Trace(path, in_order=False))
    words: list[str] = []
    requests = list(Trace(path, in_order=False, on_cut=words.append))
    assert len(requests) == 8 if line else len(requests) > 100
    assert len(words) == 1 and f"{path} is cut short at line" in words[0]
    assert line is None or f"line {line};" in words[0]
    if line is not None:
        assert main(["trace", "show", str(path)]) == 0
        assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        MOONCAKE.replace(b"1000", b"x", 1),  # a bad row that is not the last
        MOONCAKE[:-30] + b"\n",  # a bad row with a line end
        MOONCAKE[:30],  # no whole row
        b"",
    ],
)
def test_other_damage_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        list(Trace(path, on_cut=lambda _: None))


def test_a_file_without_a_last_line_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(MOONCAKE[:-1])
    words: list[str] = []
    assert len(list(Trace(path, on_cut=words.append))) == 9 and words == []
