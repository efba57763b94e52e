"""How much of the machine's processors this process is given."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def given_cpus(cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int:
    """Those it may run on, or fewer where a container's quota (cgroup `cpu.max`, or of version 1
    `cpu.cfs_quota_us`) is less: threads beyond it would stand still together, period by period."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [_quota(folder) for folder in _folders(cgroup, root)]
    return max(1, int(min([float(allowed or 1), *(q for q in quotas if q is not None)])))


def _folders(cgroup: Path, root: Path) -> list[Path]:
    """Of the groups this process is in, and of those around them."""
    found = [root]
    for line in _read(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        at = root / controllers / path.strip("/")
        found += [at, *(parent for parent in at.parents if parent.is_relative_to(root))]
    return found


def _quota(folder: Path) -> float | None:
    """In processors."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{each}_us").strip() for each in ("quota", "period")]
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
