"""A start launches the kernels that it compiled ahead: their keys are equal in every process."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

import triton_kernels
from tests.gpu_proofs.meta import SIZES

_ROOT = Path(__file__).parents[2]
_QUICK = SIZES[0].name  # a target and a draft: every kind of kernel
_REST = [pytest.param(size.name, marks=pytest.mark.gpu_proofs) for size in SIZES[1:]]


def started(folder: Path, *arguments: str) -> dict[str, Any]:
    """Start in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu_proofs.cache_keys", str(folder), *arguments]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    start: dict[str, Any] = json.loads(done.stdout)
    return start


@pytest.mark.parametrize("size", [_QUICK, *_REST])
def test_launches_find_what_was_compiled_ahead(tmp_path: Path, size: str) -> None:
    """No key is missing, in the process that compiled ahead and in a second one."""
    first, second = (started(tmp_path, size) for _ in range(2))
    assert first.pop("late") and not second.pop("late")
    assert first == second and first["launched"] > 12 and not first["missing"]


def test_keys_that_depend_on_their_order_are_caught(tmp_path: Path) -> None:
    assert sum(started(tmp_path, _QUICK, "--unsettled")["missing"].values()) > 2


def test_every_kernel_is_made_by_the_decorator_that_settles_keys() -> None:
    sources = [path.read_text() for path in (_ROOT / "triton_kernels").rglob("*.py")]
    assert sum("\n@jit" in source for source in sources) > 10
    assert not any("@triton.jit" in source for source in sources)


def test_constants_of_one_name_are_equal_within_a_kernel() -> None:
    """Triton sorts constants of one name by the addresses of their modules."""
    for module in pkgutil.walk_packages(triton_kernels.__path__, "triton_kernels."):
        functions = vars(importlib.import_module(module.name)).values()
        for kernel in (each for each in functions if isinstance(each, JITFunction)):
            kernel.cache_key  # noqa: B018
            values: dict[str, Any] = {}
            for (name, _), (value, _) in kernel.used_global_vals.items():
                assert values.setdefault(name, value) == value, f"{kernel.__name__}: {name}"
