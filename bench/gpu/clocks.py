"""Clocks of the device while it is measured, and what held them down: `nvidia-smi` writes a line
five times a second, beside everything else."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "clocks.jsonl"
_EVERY_MS = 200
_QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
# Bits of the last column that slow a device that has work; that it idles is none.
_REASONS = {
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "synchronised boost",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


class Sample(NamedTuple):
    at_s: float  # time.time()
    sm_mhz: float
    memory_mhz: float
    celsius: float
    watts: float
    reasons: int

    @property
    def throttled(self) -> list[str]:
        return [name for bit, name in _REASONS.items() if self.reasons & bit]


def parse(line: str, at_s: float) -> Sample | None:
    """A line of `nvidia-smi`; None for one that is not whole, or that lacks a figure."""
    *figures, reasons = (field.strip() for field in line.split(","))
    try:
        return Sample(at_s, *map(float, figures), int(reasons, 16))
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def recorded(out: Path) -> Iterator[None]:
    """Samples go to a file in `out`, line by line; none where there is no `nvidia-smi`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield
        return
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(
        [*command, "-i", "0", "-lms", str(_EVERY_MS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def write() -> None:
        assert process.stdout is not None
        with process.stdout, (out / FILE).open("w") as file:
            for line in process.stdout:
                sample = parse(line, time.time())
                if sample is not None:
                    file.write(json.dumps(sample) + "\n")
                    file.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        thread.join()


def samples(out: Path) -> list[Sample]:
    path = out / FILE
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError, TypeError):  # cut off in the middle
            found.append(Sample(*json.loads(line)))
    return found


def beside(row: dict[str, Any], found: Sequence[Sample]) -> dict[str, Any]:
    """A row that says when it was measured, with the clocks of that time."""
    times = row.get("at_s")
    if not found or times is None:
        return row
    return row | during(found, times[0] - _EVERY_MS * 1e-3, times[1] + _EVERY_MS * 1e-3)


def during(
    found: Sequence[Sample], begin_s: float = 0.0, end_s: float = math.inf
) -> dict[str, Any]:
    """Of the samples between two times: the usual clock and the least, the most heat and power, and
    whatever slowed the device in any. Figures are None where nothing was sampled."""
    inside = [sample for sample in found if begin_s <= sample.at_s <= end_s]
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    if not inside:
        return row
    told = {reason: None for sample in inside for reason in sample.throttled}
    return row | {
        "sm_mhz": statistics.median(sample.sm_mhz for sample in inside),
        "sm_mhz_low": min(sample.sm_mhz for sample in inside),
        "memory_mhz_low": min(sample.memory_mhz for sample in inside),
        "celsius_high": max(sample.celsius for sample in inside),
        "watts_high": max(sample.watts for sample in inside),
        "slowed_by": ", ".join(told) or "nothing",
    }


COLUMNS = (
    "sm_mhz", "sm_mhz_low", "memory_mhz_low", "celsius_high", "watts_high", "slowed_by",
)  # fmt: skip
