"""The project's kernel tests on the device. Each test is a row, read from pytest's output.

Tests run in processes of pytest-xdist if it is installed. After a fault of the device the later
tests of its process fail, too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gpu.cells import Bench, Cell, Row

_OPTIONS = ["-v", "-rpfE", "--tb=short", "-W", "default", "-p", "no:cacheprovider", "-m"]
_PROCESSES = ["--dist", "worksteal", "--max-worker-restart", "50", "-n"]
_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) (\S+::.+?)(?: - (.*))?\n")


def command(*more: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", *_OPTIONS, "", *more]
    if importlib.util.find_spec("xdist") is not None:
        words += [*_PROCESSES, str(min(14, len(os.sched_getaffinity(0))))]
    if importlib.util.find_spec("pytest_timeout") is not None:
        words += ["--timeout=90", "--timeout-method=thread"]  # of a test with its compilation
    return words


def cells(bench: Bench) -> Iterator[Cell]:
    words = command("tests/triton_kernels/interpreter", "--device=cuda")
    yield Cell("tests", {}, partial(run, bench, words))


def run(bench: Bench, words: list[str]) -> Row:
    tests, environment = 0, os.environ | {"COLUMNS": "400"}  # otherwise pytest cuts errors
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen(words, cwd=root, stdout=pipe, text=True, env=environment) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            for outcome, test, error in _RESULT.findall(line):
                status = "ok" if outcome == "PASSED" else outcome.lower()
                row = {"status": f"{status}: {error}" if error else status}
                bench.save("correctness", {test.strip(): row})
                tests += 1
    return {"tests": tests}
