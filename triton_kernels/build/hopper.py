"""Features of NVIDIA devices since compute capability 9: descriptors (TMA) and early launches.

A kernel with an early launch begins before the previous kernel has ended (programmatic dependent
launch). It calls `gdc_wait` before it reads or writes data that other kernels still use. Data that
it reads before `gdc_wait` must have been complete when the latest normally launched kernel began:
that kernel had waited for all earlier ones, while kernels with early launches may overlap.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from triton import knobs
from triton.runtime import driver

_MIN_ARCH = 90
_HOPPER_BYTES = 200 << 10  # less than the shared memory of a program on sm_90 and sm_100


def is_hopper() -> bool:
    """Return whether the device has compute capability 9 or later; False without a device."""
    if knobs.runtime.interpret:
        return False
    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        return False
    return bool(target.backend == "cuda" and target.arch >= _MIN_ARCH)


def has_large_tiles() -> bool:
    """Return whether the device has Hopper's features and the shared memory for its tiles. Consumer
    GPUs (sm_120) have these features, but less than half of the memory."""
    return is_hopper() and _shared_bytes(driver.active.get_current_device()) >= _HOPPER_BYTES


@cache
def _shared_bytes(device: int) -> int:
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def launch_options(early: bool) -> dict[str, Any]:
    """Return the options of an `early` launch, or of a normal one."""
    return {"launch_pdl": True} if early else {}
