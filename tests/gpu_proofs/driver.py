"""A Triton driver without a device: launches are specialised as on one, and recorded."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_MAX_OF_GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)  # CUDA's; AMD allows more
_DEVICES = itertools.count(1000)  # each recording has caches of its own


class Specialisation(NamedTuple):
    """The inputs of one compilation. `key` is equal if the code is."""

    key: str
    kernel: Any  # triton's JITFunction
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class Launches:
    """Recorded launches. `specialisations` has every specialisation in order, with the `phase` in
    which it was first launched."""

    def __init__(self) -> None:
        self.phase = ""
        self.specialisations: dict[str, tuple[str, Specialisation]] = {}
        self.count: Counter[str] = Counter()  # of launches, by kernel

    def first_launched_in(self, phase: str) -> list[Specialisation]:
        return [each for met, each in self.specialisations.values() if met == phase]

    def add(self, specialisation: Specialisation) -> None:
        self.specialisations.setdefault(specialisation.key, (self.phase, specialisation))


class _Unlaunched:
    """A substitute for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, name: str, launches: Launches) -> None:
        self._name, self._launches = name, launches

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, *_: object) -> None:
        for size, limit in zip((x, y, z), _MAX_OF_GRID, strict=True):
            if not 0 < size <= limit:
                raise AssertionError(f"{self._name}: a grid of {(x, y, z)} cannot be launched")
        self._launches.count[self._name] += 1


class _Utils:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class _Driver:
    utils = _Utils

    def __init__(self, target: GPUTarget) -> None:
        self._target, self._device = target, next(_DEVICES)

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
        self: Any,
        key: str,
        signature: Any,
        device: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> _Unlaunched:
        unique = f"{self.__name__} {key}"
        launches.add(
            Specialisation(unique, self, signature, constexprs, attrs, dict(options.__dict__))
        )
        kernel = self.device_caches[device][0][key] = _Unlaunched(self.__name__, launches)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", do_not_compile)
        patch.setattr(torch.version, "hip", "6.4" if target.backend == "hip" else None)
        patch.setattr(driver, "_active", _Driver(target))
        yield launches
