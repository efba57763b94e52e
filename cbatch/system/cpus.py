"""The number of processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

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
