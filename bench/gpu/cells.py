"""Cells: measurements in sequence, and the file with a row for each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
FILE = "results.json"
FAULT_EXIT = 70  # exit status of a process that lost the device; another process can continue
NOT_REACHED, NOT_FINISHED = "not reached", "not finished: its process ended"
_FAULTS = ("CUDA error", "Triton Error [CUDA]", "misaligned address", "AcceleratorError")


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
    done = results.of(section)
    new = [c for c in cells if done.get(c.key, {}).get("status", NOT_REACHED) == NOT_REACHED]
    results.save(section, {cell.key: cell.labels | {"status": NOT_REACHED} for cell in new})
    for cell in new:
        results.save(section, {cell.key: cell.labels | {"status": NOT_FINISHED}})
        began_s, fault = time.time(), ""
        try:
            row = {"status": "ok"} | cell.run() | {"at_s": [began_s, time.time()]}
        except NotAvailable as reason:
            row = {"status": f"skipped: {reason}"}
        except Exception as error:
            fault = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row = {"status": f"failed: {fault}"}
        results.save(section, {cell.key: cell.labels | row})
        if is_fault(fault):
            raise SystemExit(FAULT_EXIT)


def is_fault(text: str) -> bool:
    """Return True for an error after which its process cannot use the device."""
    return "out of memory" not in text and any(sign in text for sign in _FAULTS)
