"""What NVIDIA's devices can since compute capability 9: descriptors (TMA) and early launches.

A kernel that is launched early begins before the kernel before it has ended (programmatic dependent
launch), and waits (`gdc_wait`) before it reads or writes what others do in between. What it reads
before that must be older: written before the start of a kernel that was itself launched plainly.
"""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.runtime import driver

_LEAST_ARCH = 90


def is_hopper() -> bool:
    """Return whether the device is of that kind, or a later one. Without a device it is not."""
    if knobs.runtime.interpret:
        return False
    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        return False
    return bool(target.backend == "cuda" and target.arch >= _LEAST_ARCH)


def launch_options(early: bool) -> dict[str, Any]:
    """Options of a launch that is `early`, or is not."""
    return {"launch_pdl": True} if early else {}
