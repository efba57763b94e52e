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
from tests.gpu_proofs.sizes import USUAL

_FIRST = USUAL[0].name  # a target and a draft: every kind of kernel
_QUICK = USUAL[2].name
_COMMAND = (sys.executable, "-m", "tests.gpu_proofs.cache_keys", "--processes", "2")
_ROOT = Path(__file__).parents[2]


def started(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Start in a process of its own."""
    done = subprocess.run(
        [*_COMMAND, str(folder), *arguments], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(folder: Path, name: str) -> None:
    """Check that no key is missing, in the process that compiled ahead and in a second one."""
    (first,), (second,) = (started(folder, "--size", name) for _ in range(2))
    assert first.pop("late") and not second.pop("late")
    assert first == second and first["launched"] > 12 and not first["missing"]


def test_launches_find_what_was_compiled_ahead(tmp_path: Path) -> None:
    check(tmp_path, _FIRST)


def test_keys_that_depend_on_their_order_are_caught(tmp_path: Path) -> None:
    (start,) = started(tmp_path, "--size", _QUICK, "--unsettled")
    assert sum(start["missing"].values()) > 2


@pytest.mark.gpu_proofs
@pytest.mark.parametrize("size", [size.name for size in USUAL])
def test_launches_of_every_size(tmp_path: Path, size: str) -> None:
    check(tmp_path, size)


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
            check_constants(kernel)


def check_constants(kernel: JITFunction[Any]) -> None:
    values: dict[str, Any] = {}
    for (name, _), (value, _) in kernel.used_global_vals.items():
        assert values.setdefault(name, value) == value, f"{kernel.__name__}: {name}"
