"""Run kernels in Triton's interpreter, or compiled on a device.

Whether a kernel is interpreted is decided for the whole process when triton is imported, and the
rest of the suite needs it compiled. So this folder runs in processes of its own:

    TRITON_INTERPRET=1 python -m pytest tests/triton_kernels/interpreter
    python -m pytest tests/triton_kernels --device cuda

On a device only those tests run that take the fixture `device` and patch nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.triton_kernels.interpreter.quick import interpret, without_overflow_checks

INTERPRETED = interpret()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    runs = INTERPRETED or config.getoption("device") == "cuda"
    return None if runs or not collection_path.name.startswith("test_") else True


class OnDevice(TorchFunctionMode):
    """A mode that creates tensors on the device. Values are drawn on the host, so that they equal
    those of an interpreted run; conversions to numpy copy to the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._makers = _device_constructors()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("numpy", "__array__"):
            args = (args[0].cpu(), *args[1:])
        made = func(*args, **(kwargs or {}))
        return made.to(self.device) if func in self._makers else made


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the kernels; a test that takes it creates its tensors there."""
    chosen = torch.device(request.config.getoption("device"))
    if chosen.type == "cpu":
        yield chosen
        return
    real = torch.from_numpy  # no mode intercepts this one
    with OnDevice(chosen), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", lambda array: real(array).to(chosen))
        yield chosen


@pytest.fixture(scope="module")
def unchecked_sums() -> Iterator[None]:
    """Skip overflow checks of sums, which take a third of the time of an interpreted test."""
    with pytest.MonkeyPatch.context() as patch:
        without_overflow_checks(patch)
        yield
