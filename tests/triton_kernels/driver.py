"""A Triton driver without a device: launches are specialised as on one, and recorded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

META, EARLY = torch.device("meta"), "early "
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_MAX_OF_GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)  # CUDA's; AMD allows more
_DEVICES = itertools.count(1000)  # each recording has caches of its own


class Recorded(NamedTuple):
    """The inputs of one compilation, and the phase in which it was first launched."""

    phase: str
    kernel: Any  # triton's JITFunction
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self, target: GPUTarget) -> Any:
        source = ASTSource(self.kernel, self.signature, self.constexprs, self.attributes)
        return triton.compile(source, target=target, options=self.options)


class Launches:
    """Recorded launches: every specialisation in order, by a key that is equal if the code is.
    `order` has the name of each launch; those of early launches begin with `EARLY`."""

    def __init__(self) -> None:
        self.phase = ""
        self.order: list[str] = []
        self.by_key: dict[str, Recorded] = {}


class Unlaunched:
    """A substitute for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, *_: object) -> None:
        for size, limit in zip((x, y, z), _MAX_OF_GRID, strict=True):
            if not 0 < size <= limit:
                raise AssertionError(f"{self._name}: a grid of {(x, y, z)} cannot be launched")
        self._order.append(self._name)


class Driver:
    """A driver that reports a device of a kind."""

    def __init__(self, target: GPUTarget) -> None:
        self.utils, self._target, self._device = self, target, next(_DEVICES)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def recording(target: GPUTarget) -> Iterator[Launches]:
    """Launch kernels in this context as on a device of this kind."""
    launches = Launches()

    def do_not_compile(
        self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any,
        attrs: Any, warmup: bool,
    ) -> Unlaunched:  # fmt: skip
        made = Recorded(launches.phase, self, signature, constexprs, attrs, dict(vars(options)))
        launches.by_key.setdefault(f"{self.__name__} {key}", made)
        name = EARLY * made.options.get("launch_pdl", False) + self.__name__
        kernel = self.device_caches[device][0][key] = Unlaunched(name, launches.order)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", do_not_compile)
        patch.setattr(torch.version, "hip", "6.4" if target.backend == "hip" else None)
        patch.setattr(driver, "_active", Driver(target))
        yield launches
