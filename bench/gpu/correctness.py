"""The project's kernel tests on the device; each test is a row of a journal.

This module is a plugin of the pytest that it runs. Tests run in processes of pytest-xdist if it is
installed. A device fault loses only the test that caused it: its process ends, and another
continues.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.cells import FAULT_EXIT, NOT_REACHED, Journal, is_fault

SECTION = "correctness"
TESTS = "tests/triton_kernels/interpreter"
_ROOT = Path(__file__).parents[2]
_LOST = pytest.StashKey[bool]()
_JOURNAL = "CBATCH_TEST_JOURNAL"  # environment variable with the path of the journal
_TEST_S = 90  # time limit of a test, compilation included
_MAX_PROCESSES = 14


def command(*more: str, processes: int = _MAX_PROCESSES) -> list[str]:
    """Return a pytest command over the tests for a device. 0 `processes` means no pytest-xdist."""
    words = [sys.executable, "-m", "pytest", TESTS, "-q", "-W", "default", "-p", __name__]
    words += ["-p", "no:cacheprovider", "-m", "", *more]  # statistics too
    if processes and importlib.util.find_spec("xdist") is not None:
        count = min(processes, len(os.sched_getaffinity(0)))
        words += ["-n", str(count), "--dist", "worksteal", "--max-worker-restart", "50"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        words += [f"--timeout={_TEST_S}", "--timeout-method=thread"]
    return words


# --- the plugin -----------------------------------------------------------------------------------


def _journal() -> Journal | None:
    """Return the journal in the process that reports; None in workers."""
    path = os.environ.get(_JOURNAL)
    return Journal(Path(path)) if path and "PYTEST_XDIST_WORKER" not in os.environ else None


def _list_tests(tests: list[str], status: str = NOT_REACHED) -> None:
    journal = _journal()
    if journal is not None and not journal.rows:
        journal.write(rows={test: {"test": test, "status": status} for test in tests})


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:
        status = "unmeasured" if session.config.option.collectonly else NOT_REACHED
        _list_tests([item.nodeid for item in session.items], status)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: object, ids: list[str]) -> None:
    _list_tests(ids)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a row after a test's call, or as soon as a phase of it fails."""
    journal, test = _journal(), report.nodeid
    if journal is None or (report.when != "call" and not report.failed):
        return
    if report.failed and journal.rows[test]["status"].startswith("failed"):
        return  # the row has the error that ended its process
    lines = report.longreprtext.splitlines()
    errors = [line[2:].strip() for line in lines if line.startswith("E ")] or lines[:1]
    status = "ok" if report.passed else f"{report.outcome}: {' '.join(errors)[:300]}"
    row = {"test": test, "seconds": round(report.duration, 2), "status": status}
    journal.write(rows={test: row})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None and is_fault(call.excinfo.exconly()):
        item.stash[_LOST] = True


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End this process if it lost the device; pytest-xdist starts another."""
    if item.stash.get(_LOST, False) and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(FAULT_EXIT)


def run(out: Path) -> int:
    """Run the tests. Return pytest's exit status, or 0 for failed tests, which their rows show."""
    environment = os.environ | {_JOURNAL: str(out / f"{SECTION}.jsonl")}
    words = command("--device=cuda")
    if not torch.cuda.is_available():  # only list the tests
        words, environment["TRITON_INTERPRET"] = command("--collect-only", processes=0), "1"
    done = subprocess.run(words, cwd=_ROOT, env=environment, stdout=sys.stderr, check=False)
    return done.returncode if done.returncode > 1 else 0
