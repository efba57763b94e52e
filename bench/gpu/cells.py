"""Cells: measurements in sequence, each with a row on disk before the next begins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.turns import DeviceTurns

Row = dict[str, Any]
FAULT_EXIT = 70  # exit status of a process that lost the device; another process can continue
NOT_REACHED, NOT_FINISHED = "not reached", "not finished: its process ended"
_FAULTS = ("CUDA error", "Triton Error [CUDA]", "misaligned address", "AcceleratorError")


class NotAvailable(Exception):  # noqa: N818 - it is no error of the run
    """The subject of a cell cannot run here, or not on its inputs."""


class Cell(NamedTuple):
    """A measurement. `labels` describe it; `run` measures and returns the figures. A `timed` cell
    has the device to itself."""

    key: str
    labels: Row
    run: Callable[[], Row]
    timed: bool = True


class Journal:
    """Rows of a section by cell, in a file of JSON lines. A later row replaces an earlier one of
    the same cell. Initially every cell has a row with status "not reached"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.about: Row = {}  # facts about the machine
        self._read_bytes = 0
        self.read()

    def read(self) -> None:
        """Read the lines that any process has appended since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
        self._read_bytes += len(whole) + bool(whole)
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # incomplete: its process was killed
                continue
            self.about |= entry.get("about", {})
            self.rows |= entry.get("rows", {})

    def write(self, *, rows: dict[str, Row] | None = None, about: Row | None = None) -> None:
        entry = json.dumps({"rows": rows or {}, "about": about or {}}, default=str)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{entry}\n")  # an incomplete last line stays separate
        self.read()


def run_cells(cells: Iterable[Cell], journal: Journal, turns: DeviceTurns) -> None:
    """Run the cells that no process has begun. A failed cell has the error in its row. Raises
    SystemExit(FAULT_EXIT) once the device is lost."""
    cells = list(cells)
    new = {c.key: c.labels | {"status": NOT_REACHED} for c in cells if c.key not in journal.rows}
    journal.write(rows=new)
    for cell in cells:
        if journal.rows[cell.key]["status"] != NOT_REACHED:
            continue
        turns.acquire() if cell.timed else turns.release()
        journal.write(rows={cell.key: cell.labels | {"status": NOT_FINISHED}})
        began_s, lost = time.time(), False
        try:
            row = {"status": "ok"} | cell.run() | {"at_s": [began_s, time.time()]}
        except NotAvailable as reason:
            row = {"status": f"skipped: {reason}"}
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row, lost = {"status": f"failed: {text}"}, is_fault(text)
        journal.write(rows={cell.key: cell.labels | row})
        if lost:
            raise SystemExit(FAULT_EXIT)
    turns.release()


def is_fault(text: str) -> bool:
    """Return True for an error after which its process cannot use the device. Lack of memory is
    no such error."""
    return "out of memory" not in text and any(sign in text for sign in _FAULTS)
