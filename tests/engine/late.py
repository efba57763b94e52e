"""Background kernels of an engine without a device. A test decides when their compilers end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from cbatch.runtime.gpu.capture import SHAPED, UncompiledKernels
from tests.triton_kernels.driver import TARGETS
from triton_kernels.build import ahead
from triton_kernels.build.ahead import Specialisation

_CHILD = """
import pathlib, pickle, sys, time
(work,), niceness = pickle.load(sys.stdin.buffer), sys.argv[2]
go = pathlib.Path(sys.argv[1]) / work.name
for _ in range(6000):
    if go.exists():
        sys.exit(int(go.read_text()))
    time.sleep(0.01)
sys.exit(1)
"""
_KERNEL, _MODULE = "shape_kernel", "triton_kernels.sampling.shape"


class HeldKernels(NamedTuple):
    """`kernels`, with compiling processes that end when `end` is called."""

    kernels: UncompiledKernels
    folder: Path

    def end(self, status: int = 0) -> None:
        part = self.folder / "part"
        part.write_text(str(status))
        part.rename(self.folder / _KERNEL)

    def end_all(self) -> None:
        """End all processes and wait for them."""
        if self.kernels.pending:
            self.end()
        while self.kernels._running:
            time.sleep(0.01)
            self.kernels.pending  # noqa: B018


def held_kernels(folder: Path, patch: pytest.MonkeyPatch) -> HeldKernels:
    patch.setattr(ahead, "COMMAND", (sys.executable, "-c", _CHILD, str(folder)))
    patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    kernel = Specialisation(_MODULE, _KERNEL, {}, {}, {}, {}, TARGETS["sm_90"])
    return HeldKernels(UncompiledKernels({frozenset((SHAPED,)): {_KERNEL: kernel}}), folder)
