"""Settings for the whole suite: two threads, and hypothesis that gives the same verdict twice.

Tests of interpreted kernels need a process of their own: it runs beside the other tests, and is
looked at last. Where it is the whole suite that runs, so do a few long tests, and what compiles all
builds of our C kernels before their tests come."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from cbatch.system.cache import cache_folder

# Nothing that is collected is garbage: half a million objects, looked through again and again.
gc.disable()

HERE = Path(__file__).parent
CACHE = "cbatch-tests-"

os.environ.setdefault("OMP_NUM_THREADS", "2")
# Step costs measured while other tests run are not for the user's engines. Compiled kernels
# are keyed by their source, so test runs share those of the user. A process that a test starts
# shares the cache of its parent.
if not Path(os.environ.get("XDG_CACHE_HOME", "")).name.startswith(CACHE):
    compiled = cache_folder("compiled")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix=CACHE)
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    shared = cache_folder("compiled")
    if compiled is not None and shared is not None:
        compiled.mkdir(parents=True, exist_ok=True)
        shared.parent.mkdir(parents=True, exist_ok=True)
        shared.symlink_to(compiled)
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


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "cuda: run the tests of kernels that take `device`, compiled, and no others"
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Without `--device cuda` the suite is that of the CPU, on a machine with a GPU too."""
    if config.getoption("device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def short_profiles() -> Iterator[None]:
    """Engines measure their steps once each before they serve, not for three seconds."""
    from cbatch.engine.prices.startup import profile_costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(profile_costs.__kwdefaults__, "budget_s", 0.0)
        yield


INTERPRETED = {
    "test_kernels_in_the_interpreter": HERE / "triton_kernels" / "interpreter",
    "test_proofs_in_the_interpreter": HERE / "gpu_proofs" / "interpreted",
    "test_sections_with_interpreted_kernels": HERE / "bench" / "interpreted",
}


# Long ones that look at no time, and leave a processor idle or wait for other processes.
APART = {
    "tests/bench/test_peers.py::test_all_of_them_agree_and_are_timed",
    "tests/hostile/test_hostile.py::test_a_hostile_quarter_minute",
}
_WHOLE = 1000  # so many tests are the suite, and not a part of it


class Beside(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @classmethod
    def start(cls, *command: str, **environment: str) -> Beside:
        """A module of Python with arguments."""
        output = tempfile.TemporaryFile()  # noqa: SIM115 - open until the end
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=HERE.parent,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
        )
        return cls(process, output)

    @classmethod
    def pytest(cls, *chosen: str, **environment: str) -> Beside:
        return cls.start("pytest", "-q", "-p", "no:cacheprovider", *chosen, **environment)

    def later(self) -> Beside:
        """Beside what has to come first."""
        os.setpriority(os.PRIO_PROCESS, self.process.pid, 10)
        return self

    def ended(self) -> tuple[int, str]:
        """Exit status and output."""
        status = self.process.wait()
        self.output.seek(0)
        return status, self.output.read().decode()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


_BESIDE = pytest.StashKey[dict[str, Beside]]()
_KERNELS, _COMPILING = "interpreted kernels", "compiling"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("device") == "cuda":
        chosen = [item for item in items if _runs_on_a_device(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    items.sort(key=lambda item: item.name in INTERPRETED or item.nodeid in APART)


def _runs_on_a_device(item: pytest.Item) -> bool:
    """A compiled kernel does not see what a test patches."""
    fixtures = getattr(item, "fixturenames", ())
    return "device" in fixtures and "monkeypatch" not in fixtures


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    beside = session.config.stash[_BESIDE] = {}
    if session.config.option.collectonly:
        return
    folders = [str(INTERPRETED[i.name]) for i in session.items if i.name in INTERPRETED]
    if folders:
        beside[_KERNELS] = Beside.pytest(*folders, TRITON_INTERPRET="1")
    if len(session.items) > _WHOLE:
        beside[_COMPILING] = Beside.start("tests.runtime.compiled_ahead").later()
        for item in session.items:
            if item.nodeid in APART and isinstance(item, pytest.Function):
                beside[item.nodeid] = Beside.pytest(item.nodeid).later()
                item.obj = partial(passes, beside[item.nodeid])


def passes(beside: Beside, **_: object) -> None:
    status, output = beside.ended()
    assert status == 0, output
    assert "1 passed" in output


def pytest_unconfigure(config: pytest.Config) -> None:
    for beside in config.stash.get(_BESIDE, {}).values():
        beside.end()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Exit status and output of the tests of all selected folders of `INTERPRETED`."""
    return request.config.stash[_BESIDE][_KERNELS].ended()
