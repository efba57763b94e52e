"""Clocks of the device during measurements, and the reasons for slowdowns, from `nvidia-smi` five
times a second."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

_EVERY_MS = 200
QUERY = "clocks.sm,power.draw,clocks_event_reasons.active"
# Bits in the last column of QUERY that mean a slowdown of a busy device.
_REASONS = {
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


class Sample(NamedTuple):
    at_s: float  # time.time()
    sm_mhz: float
    watts: float
    reasons: int


def parse(line: str, at_s: float) -> Sample | None:
    """Parse a line of `nvidia-smi`; return None if it is incomplete or lacks a figure."""
    *figures, reasons = (field.strip() for field in line.split(","))
    try:
        return Sample(at_s, *map(float, figures), int(reasons, 16))
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def recorded() -> Iterator[list[Sample]]:
    """Yield a list to which samples are appended; it stays empty without `nvidia-smi`."""
    samples: list[Sample] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        yield samples
        return
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-i", "0"]
    process = subprocess.Popen(
        [*command, "-lms", str(_EVERY_MS)], stdout=subprocess.PIPE, text=True
    )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                sample = parse(line, time.time())
                if sample is not None:
                    samples.append(sample)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        process.kill()
        process.wait()
        thread.join()


def during(samples: list[Sample], begin_s: float, end_s: float) -> dict[str, Any]:
    """Return the lowest clock and the highest power between two times, and the reasons for
    slowdowns; {} without samples."""
    margin_s = _EVERY_MS * 1e-3
    inside = [s for s in samples if begin_s - margin_s <= s.at_s <= end_s + margin_s]
    if not inside:
        return {}
    reasons = {name for s in inside for bit, name in _REASONS.items() if s.reasons & bit}
    return {
        "sm_mhz_low": min(s.sm_mhz for s in inside),
        "watts_high": max(s.watts for s in inside),
        "slowed_by": ", ".join(sorted(reasons)) or "nothing",
    }
