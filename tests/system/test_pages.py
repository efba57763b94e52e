"""Zeroed memory whose pages are populated in the background."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from cbatch.system.pages import zeros_populated_in_background

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere it does nothing")
SIZE_BYTES = 1 << 28


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def populating() -> bool:
    return any(thread.name == "cbatch-pages" for thread in threading.enumerate())


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


def test_memory_may_be_freed_before_its_pages_are_populated() -> None:
    for _ in range(20):
        zeros_populated_in_background(SIZE_BYTES)
    wait_until(lambda: not populating())


def test_a_small_array_is_not_populated() -> None:
    assert not zeros_populated_in_background(1000).any() and not populating()
