"""Settings for the whole suite: few threads, and a deterministic hypothesis.

Tests of interpreted kernels need processes of their own, in which TRITON_INTERPRET is 1.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# Each worker of pytest-xdist has one processor. A pytest that a test starts is not a worker.
if os.environ.pop("PYTEST_XDIST_WORKER", None) is not None:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Engines measure each step once before they serve, not for three seconds. Step costs that are
# measured while other tests run are not for the user's engines.
os.environ.setdefault("CBATCH_PROFILE_SECONDS", "0")
if "CBATCH_COSTS" not in os.environ:
    os.environ["CBATCH_COSTS"] = tempfile.mkdtemp(prefix="cbatch-costs-")
    atexit.register(shutil.rmtree, os.environ["CBATCH_COSTS"], ignore_errors=True)
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
    """Without `--device cuda` the suite is that of the CPU, on a machine with a GPU, too."""
    if config.getoption("device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# A worker of pytest-xdist takes the next file: long files come first, to end with the others.
LONGEST = (
    *("test_same_text", "test_peers", "test_gpu_run", "test_hostile", "test_compile_cache"),
    *("test_builds", "test_bounds"),  # these compile C where the user's cache lacks it
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    if config.getoption("device") == "cuda":
        chosen = [item for item in items if _runs_on_a_device(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _runs_on_a_device(item: pytest.Item) -> bool:
    """Return True if a test can run on a device: a compiled kernel does not see a test's
    patches."""
    fixtures = getattr(item, "fixturenames", ())
    return "device" in fixtures and "monkeypatch" not in fixtures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason of skipped tests once, with their number."""
    skipped = terminalreporter.stats.get("skipped", ())
    counts = Counter(str(each.longrepr[2]).removeprefix("Skipped: ") for each in skipped)
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
