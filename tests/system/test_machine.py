"""The cache folder, the processors of a container, and memory populated in the background."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import numpy as np
import pytest

from cbatch.system.cache import cache_folder
from cbatch.system.machine import usable_cpus
from cbatch.system.pages import zeros_populated_in_background
from tests.server.http_client import wait_until

needs_linux = pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere it does nothing")


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("costs") == Path("/cache/cbatch/costs")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder("costs") == Path("/home/me/.cache/cbatch/costs")


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("costs") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("costs") == Path("/cache/cbatch/costs")


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


SIZE_BYTES = 1 << 28


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def populating() -> bool:
    return any(thread.name == "cbatch-pages" for thread in threading.enumerate())


@needs_linux
def test_populating_pages_does_not_change_their_contents() -> None:
    if tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (5, 14):
        pytest.skip("the kernel makes pages only as they are used")
    wait_until(lambda: not populating())
    before = resident_bytes()
    memory = zeros_populated_in_background(SIZE_BYTES)
    memory[:: SIZE_BYTES // 8] = 7  # meanwhile
    wait_until(lambda: not populating())
    assert resident_bytes() - before > 0.8 * SIZE_BYTES
    assert np.flatnonzero(memory).tolist() == list(range(0, SIZE_BYTES, SIZE_BYTES // 8))


@needs_linux
def test_memory_may_be_freed_before_its_pages_are_populated() -> None:
    for _ in range(10):
        zeros_populated_in_background(SIZE_BYTES)
    wait_until(lambda: not populating())


@needs_linux
def test_a_small_array_is_not_populated() -> None:
    assert not zeros_populated_in_background(1000).any() and not populating()
