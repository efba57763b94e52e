"""Bad traces: each reader names the problem with file, line and field, and stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

Command = Callable[..., Run]
HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
GOOD = HEAD + "0.5,20,3\n0.75,30,4\n"
CONSTANT = ("--num-blocks", 200, "--max-model-len", 500, "--step-seconds", 0.01)
READERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "show": (("trace", "show"), ()),
    "sim": (("sim",), CONSTANT),
    "fleet": (("sim",), (*CONSTANT, "--replicas", 2)),
    "sweep": (("sim",), (*CONSTANT, "--sweep", "max-num-seqs=1,2", "--processes", 1)),
    "capacity": (("sim", "capacity"), (*CONSTANT, "--slo", "ttft=1")),
}
BAD: dict[str, tuple[str | bytes | None, str]] = {
    # name: (text, place and problem)
    "absent": (None, ": file: cannot be read"),
    "empty": ("", ": file: is empty"),
    "a header alone": (HEAD, ": file: has no requests"),
    "unknown columns": ("when,what\n1,2\n", ", line 1: columns: 'when, what' match no"),
    "one unknown column": (
        GOOD.replace("\n", ",colour\n", 1),
        ", line 1: colour: is an unknown column",
    ),
    "a column short": (GOOD + "1,2\n", ", line 4: columns: 2 cells under 3 names"),
    "unsorted": (GOOD + "0.6,1,1\n", ", line 4: arrival: is 0.15 s before the row above"),
    "a negative stamp": (GOOD + "-1,1,1\n", ", line 4: arrived_at: -1.0 is negative"),
    "no prompt": (GOOD + "1,0,1\n", ", line 4: prompt: has 0 tokens"),
    "no output": (GOOD + "1,1,0\n", ", line 4: output: has 0 tokens"),
    "a negative length": (GOOD + "1,-5,1\n", ", line 4: num_prefill_tokens: -5 is negative"),
    "NaN for a stamp": (GOOD + "nan,1,1\n", ", line 4: arrived_at: 'nan' is not a finite number"),
    "NaN for a length": (GOOD + "1,1,nan\n", ", line 4: num_decode_tokens: 'nan' is not a finite"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", BAD)
def test_errors_about_bad_traces_name_the_place(
    cbatch: Command, tmp_path: Path, name: str, reader: str
) -> None:
    text, words = BAD[name]
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    command, options = READERS[reader]
    run = cbatch(*command, path, *options)
    assert run.status == 2 and str(path) in run.err and words in run.err, run.err
    assert not run.lines, "and no report"


@pytest.mark.parametrize("reader", ["sim", "fleet", "sweep", "capacity"])
def test_requests_larger_than_the_pool_are_reported(
    cbatch: Command, tmp_path: Path, reader: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(GOOD + "1,480,3\n1.5,20,3\n")
    command, options = READERS[reader]
    small = (*options, "--num-blocks", 20)
    run = cbatch(*command, path, *small)
    assert run.status == 0, run.err
    if reader != "capacity":
        assert "refused" in run.out
    if reader in ("sim", "fleet"):
        assert "(the whole KV pool). However, your prompt resulted in 480 tokens" in run.out
        assert (run.lines[-1]["requests"], run.lines[-1]["refused"]) == (3, 1)
