"""Settings for the whole suite: two threads, and hypothesis that gives the same verdict twice.

Tests of interpreted kernels need a process of their own, and are the longest of the suite: it runs
beside the other tests, and is looked at last."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# Nothing that is collected is garbage: half a million objects, looked through again and again.
gc.disable()

HERE = Path(__file__).parent
CACHE = "cbatch-tests-"

os.environ.setdefault("OMP_NUM_THREADS", "2")
# The suite is that of the CPU, and of kernels in the interpreter, on a machine with a GPU too.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Step costs measured beside other tests are not for the user's engines. A process of tests that
# another one started shares its cache, and need not compile anew.
if not Path(os.environ.get("XDG_CACHE_HOME", "")).name.startswith(CACHE):
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix=CACHE)
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Threads that wait by spinning make the suite several times slower where the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "cbatch",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("cbatch")


@pytest.fixture(scope="session", autouse=True)
def short_profiles() -> Iterator[None]:
    """Engines measure their steps once each before they serve, not for three seconds."""
    from cbatch.engine.step_profile import profile_costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(profile_costs.__kwdefaults__, "budget_s", 0.0)
        yield


INTERPRETED = {
    "test_kernels_in_the_interpreter": HERE / "triton_kernels" / "interpreter",
    "test_proofs_in_the_interpreter": HERE / "gpu_proofs" / "interpreted",
    "test_sections_with_interpreted_kernels": HERE / "bench" / "interpreted",
}


class Beside(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]


_BESIDE = pytest.StashKey[Beside]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name in INTERPRETED)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    folders = [str(INTERPRETED[i.name]) for i in session.items if i.name in INTERPRETED]
    if not folders or session.config.option.collectonly:
        return
    output = tempfile.TemporaryFile()  # noqa: SIM115 - open until the end
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    process = subprocess.Popen(
        command, cwd=HERE.parent, env=environment, stdout=output, stderr=output
    )
    session.config.stash[_BESIDE] = Beside(process, output)


def pytest_unconfigure(config: pytest.Config) -> None:
    beside = config.stash.get(_BESIDE, None)
    if beside is not None:
        beside.process.kill()
        beside.process.wait()
        beside.output.close()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Exit status and output of the tests of all selected folders of `INTERPRETED`."""
    beside = request.config.stash[_BESIDE]
    status = beside.process.wait()
    beside.output.seek(0)
    return status, beside.output.read().decode()
