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
from typing import Any

from bench.gpu.cells import Cell, Row
from bench.gpu.environment import Bench

SECTION = "correctness"
TESTS = "tests/triton_kernels/interpreter"
_ROOT = Path(__file__).parents[2]
_TEST_S = 90  # time limit of a test, compilation included
_MAX_PROCESSES = 14
_WRITE_EVERY = 20  # tests
_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) (\S+::.+?)(?: - (.*))?\n")


def command(*more: str) -> list[str]:
    """Return a pytest command over the tests for a device; statistics too."""
    words = [sys.executable, "-m", "pytest", TESTS, "-v", "-rpfE", "--tb=short", "-W", "default"]
    words += ["-p", "no:cacheprovider", "-m", "", *more]
    if importlib.util.find_spec("xdist") is not None:
        count = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
        words += ["-n", str(count), "--dist", "worksteal", "--max-worker-restart", "50"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        words += [f"--timeout={_TEST_S}", "--timeout-method=thread"]
    return words


def cells(bench: Bench) -> Iterator[Cell]:
    yield Cell("tests", {}, partial(run, bench))


def run(bench: Bench) -> Row:
    """Run the tests and save a row for each."""
    rows: dict[str, Row] = {}
    options: Any = {"cwd": _ROOT, "stdout": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"COLUMNS": "400"}  # otherwise pytest cuts errors
    with subprocess.Popen(command("--device=cuda"), **options) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            for outcome, test, error in _RESULT.findall(line):
                status = "ok" if outcome == "PASSED" else outcome.lower()
                rows[test.strip()] = {"status": f"{status}: {error}" if error else status}
                if len(rows) % _WRITE_EVERY == 0:
                    bench.results.save(SECTION, rows)
    bench.results.save(SECTION, rows)
    return {"tests": len(rows)}
