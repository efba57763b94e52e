"""The machine and the package versions that a measurement was made with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("cbatch", "llama-cpp-python", "numpy", "msgspec", "torch", "transformers", "triton")


def describe_machine() -> dict[str, Any]:
    """Return processor model, cores this process may use, load, memory in GiB, and system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": platform.platform(terse=True),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages, without importing them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the machine's total memory in bytes. Free memory would differ at every start."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not a POSIX system: assume 4 GiB
        return 4 * 2**30


def mib(size_bytes: int) -> str:
    """Return a size as text, in MiB."""
    return f"{size_bytes / 2**20:,.0f} MiB"
