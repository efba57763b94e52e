"""Processor time of the host in a step, with launches that do nothing; needs no GPU. The program is
one of the project's tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gpu.cells import Bench, Cell, Row

_PROGRAM = [sys.executable, "-m", "tests.gpu_proofs.host_time"]


def cells(bench: Bench) -> Iterator[Cell]:
    yield Cell("host", {}, partial(run, bench, _PROGRAM))


def run(bench: Bench, words: list[str]) -> Row:
    root, pipe, steps = Path(__file__).parents[2], subprocess.PIPE, 0
    with subprocess.Popen(words, cwd=root, stdout=pipe, text=True) as process:
        for line in process.stdout or ():
            row = json.loads(line)
            key = f"{row['lookahead']} {row['requests']}"
            bench.save("host", {key: row | {"what": "host time", "status": "ok"}})
            steps += 1
    if process.returncode or not steps:
        raise RuntimeError(f"{words[-1]}: exit status {process.returncode} after {steps} rows")
    return {"steps": steps}
