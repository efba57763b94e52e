"""Large tensors lie on huge pages if the kernel grants them on request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROGRAM = """
import cbatch.runtime, torch
x = torch.ones(64 << 20, dtype=torch.uint8)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("AnonHugePages")))
"""


def test_weights_get_huge_pages() -> None:
    if not _SETTING.exists() or "[madvise]" not in _SETTING.read_text():
        pytest.skip("the kernel does not grant huge pages on request (madvise)")
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) >= 32 << 10, "KiB of huge pages under a tensor of 64 MiB"
