"""Small tensors: one thread is the fastest, and a busy machine then cannot stall a barrier.

Tests of interpreted kernels need a process of their own, and are the longest of the suite: it runs
beside the other tests, and is looked at last."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
import torch

FOLDER = Path(__file__).parent / "interpreter"
ROOT = FOLDER.parents[2]
TEST = "test_kernels_in_the_interpreter"


class Beside(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]


_BESIDE = pytest.StashKey[Beside]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == TEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    selected = any(item.name == TEST for item in session.items)
    if not selected or session.config.option.collectonly:
        return
    output = tempfile.TemporaryFile()  # noqa: SIM115 - open until the end
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    session.config.stash[_BESIDE] = Beside(process, output)


def pytest_unconfigure(config: pytest.Config) -> None:
    beside = config.stash.get(_BESIDE, None)
    if beside is not None:
        beside.process.kill()
        beside.process.wait()
        beside.output.close()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Exit status and output of the tests in the folder `interpreter`."""
    beside = request.config.stash[_BESIDE]
    status = beside.process.wait()
    beside.output.seek(0)
    return status, beside.output.read().decode()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
