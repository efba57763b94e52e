"""The machine and the package versions that a measurement was made with."""

from __future__ import annotations

import errno
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


_NO_MEMORY = ("failed to map segment", "allocate memory", "can't start new thread")
MEMORY_REMEDY = "ask for less (--kv-cache-memory-bytes), or raise the limit (ulimit -v)"


def memory_problem(error: BaseException) -> str | None:
    """Return in a line what an error says if memory, or address space, is used up; else None."""
    text = (str(error).strip() or "it is used up").splitlines()[-1]
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return text
    return text if any(words in text for words in _NO_MEMORY) else None


def address_space_note() -> str:
    """Return a remark about a limit on address space; empty without a limit. Libraries that reach
    it end the process in ways that do not name it."""
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; a process may have {mib(limit)} of address space here (ulimit -v)"


def mib(size_bytes: int) -> str:
    """Return a size as text, in MiB."""
    return f"{size_bytes / 2**20:,.0f} MiB"
