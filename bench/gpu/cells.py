"""Cells: measurements in sequence, and the file with a row for each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
FILE = "results.json"
FAULT_EXIT = 70  # exit status of a process that lost the device; another process can continue
NOT_REACHED, NOT_FINISHED = "not reached", "not finished: its process ended"
_FAULTS = ("CUDA error", "Triton Error [CUDA]", "misaligned address", "AcceleratorError")
# Bits of the device's clock event reasons that mean a slowdown of a busy device.
_SLOWDOWNS = {
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


class NotAvailable(Exception):  # noqa: N818 - it is no error of the run
    """The subject of a cell cannot run here, or not on its inputs."""


class Cell(NamedTuple):
    """A measurement. `labels` describe it; `run` measures and returns the figures."""

    key: str
    labels: Row
    run: Callable[[], Row]


class Results:
    """The rows of a run in one file, which is replaced after every change. One process writes at a
    time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.about: Row = {}  # facts about the machine
        self.rows: list[Row] = []
        if self._path.exists():
            self.about, self.rows = json.loads(self._path.read_text(encoding="utf-8")).values()

    def of(self, section: str) -> dict[str, Row]:
        return {row["cell"]: row for row in self.rows if row["section"] == section}

    def save(self, section: str, rows: dict[str, Row]) -> None:
        """Add rows by cell, or replace them."""
        new = {(section, cell): {"section": section, "cell": cell} | rows[cell] for cell in rows}
        known = {(row["section"], row["cell"]): row for row in self.rows}
        self.rows = list((known | new).values())
        document = json.dumps({"about": self.about, "rows": self.rows}, indent=0, default=str)
        part = self._path.with_suffix(".part")
        part.write_text(document + "\n", encoding="utf-8")
        os.replace(part, self._path)


def run_cells(section: str, cells: Iterable[Cell], results: Results) -> None:
    """Run the cells that no process has begun. A failed cell has the error in its row. Raises
    SystemExit(FAULT_EXIT) once the device is lost."""
    cells, done = list(cells), results.of(section)
    new = [
        cell for cell in cells if done.get(cell.key, {}).get("status", NOT_REACHED) == NOT_REACHED
    ]
    results.save(section, {cell.key: cell.labels | {"status": NOT_REACHED} for cell in new})
    with clock_samples() as samples:
        for cell in new:
            results.save(section, {cell.key: cell.labels | {"status": NOT_FINISHED}})
            began_s, text = time.time(), ""
            try:
                row = {"status": "ok"} | cell.run() | slowdowns(samples, began_s)
            except NotAvailable as reason:
                row = {"status": f"skipped: {reason}"}
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                row = {"status": f"failed: {text}"}
            results.save(section, {cell.key: cell.labels | row})
            if is_fault(text):
                raise SystemExit(FAULT_EXIT)


def is_fault(text: str) -> bool:
    """Return True for an error after which its process cannot use the device."""
    return "out of memory" not in text and any(sign in text for sign in _FAULTS)


@contextlib.contextmanager
def clock_samples() -> Iterable[list[tuple[float, float, int]]]:
    """Yield a list of (time, MHz, slowdown bits), which grows five times a second. Without
    `nvidia-smi` it stays empty."""
    samples: list[tuple[float, float, int]] = []
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks_event_reasons.active", "-lms", "200"]
    command += ["--format=csv,noheader,nounits", "-i", "0"]
    if shutil.which(command[0]) is None:
        yield samples
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            for line in process.stdout or ():
                with contextlib.suppress(ValueError):  # an incomplete line
                    mhz, reasons = line.split(",")
                    samples.append((time.time(), float(mhz), int(reasons, 16)))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            process.kill()
            thread.join()


def slowdowns(samples: Iterable[tuple[float, float, int]], since_s: float) -> Row:
    """Return the lowest clock since then, and what slowed the device."""
    recent = [sample for sample in samples if sample[0] >= since_s]
    if not recent:
        return {}
    reasons = {name for _, _, bits in recent for bit, name in _SLOWDOWNS.items() if bits & bit}
    low = min(mhz for _, mhz, _ in recent)
    return {"sm_mhz_low": low, "slowed_by": ", ".join(sorted(reasons)) or "nothing"}
