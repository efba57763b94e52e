"""The number of processors that a container's quota allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbatch.system.cpus import usable_cpus

V1 = "cpu,cpuacct/x/cpu.cfs_{}_us"


@pytest.mark.parametrize(
    ("groups", "files", "given"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "350000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b", {"a/cpu.max": "50000 100000"}, 1),
        (
            "3:memory:/x\n2:cpu,cpuacct:/x",
            {V1.format("quota"): "400000", V1.format("period"): "100000"},
            4,
        ),
        (
            "2:cpu,cpuacct:/x",
            {V1.format("quota"): "-1", V1.format("period"): "100000"},
            8,
        ),
        ("", {}, 8),
        ("0::/", {"cpu.max": "broken"}, 8),
    ],
)
def test_the_lowest_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], given: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    cgroup = tmp_path / "cgroup"
    cgroup.write_text(groups)
    for name, content in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(content + "\n")
    assert usable_cpus(cgroup, tmp_path / "fs") == given
