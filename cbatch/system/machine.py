"""The machine: its processors and memory, and the package versions of a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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
    return f"{size_bytes / 2**20:,.0f} MiB"


_CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int:
    """Return the number of processors in the affinity mask, or the container's quota if lower. The
    quota is cgroup `cpu.max`, or `cpu.cfs_quota_us` of version 1. The kernel pauses all threads of
    a process that exceeds its quota, so more threads than the quota would only stall each other."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [_quota(folder) for folder in _folders(cgroup, root)]
    return max(1, int(min([float(allowed or 1), *(q for q in quotas if q is not None)])))


def _folders(cgroup: Path, root: Path) -> list[Path]:
    """Return the folders of this process's cgroups and of their parents."""
    folders = [root]
    for line in _read(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / controllers / path.strip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return folders


def _quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
