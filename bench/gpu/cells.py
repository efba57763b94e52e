"""A section is a list of cells; a cell leaves one row, written down before the next begins.

The journal of a section is a file of JSON lines: a cell's beginning, then its row. Whoever reads it
after a crash knows what was measured and what the crash befell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.world import is_fault

Row = dict[str, Any]
FAULT_EXIT = 70  # the device is lost to the process; another one may go on


class Absent(Exception):  # noqa: N818 - a fact, not a fault
    """What a cell would measure cannot be had here, or not for its inputs."""


class Cell(NamedTuple):
    """`labels` say what is measured; `run` measures and returns the figures."""

    key: str
    labels: Row
    run: Callable[[], Row]


class TimeBudget:
    """Seconds of a section. Counted from its making."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._start_s = seconds, clock, clock()

    def left_s(self) -> float:
        return self.seconds - (self._clock() - self._start_s)


class Journal:
    """Rows of a section, on disk as soon as they are known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.begun: Row | None = None  # the cell that has begun and left no row
        for line in path.read_text().splitlines() if path.exists() else ():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the last line of a process that was killed
            return
        if "begins" in entry:
            self.begun = entry
        else:
            self.rows[entry["key"]] = entry["row"]
            self.begun = None

    def begin(self, cell: Cell) -> None:
        self._write({"begins": cell.key, "labels": cell.labels})

    def end(self, key: str, row: Row) -> None:
        self._write({"key": key, "row": row})

    def abandon(self, status: str) -> bool:
        """Give the cell that has begun a row of that status; False if there is none."""
        if self.begun is None:
            return False
        self.end(self.begun["begins"], self.begun["labels"] | {"status": status})
        return True

    def _write(self, entry: Row) -> None:
        line = json.dumps(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._take(line)


def run_cells(cells: Iterable[Cell], journal: Journal, left_s: Callable[[], float]) -> None:
    """Run what the journal has no row of. A cell that fails says so in its row; what the time does
    not reach is named, too. Raises SystemExit(FAULT_EXIT) once the device is lost."""
    for cell in cells:
        if cell.key in journal.rows:
            continue
        if left_s() <= 0:
            journal.end(cell.key, cell.labels | {"status": "skipped: the section's time was up"})
            continue
        journal.begin(cell)
        began_s = time.time()
        try:
            row = cell.labels | cell.run()
        except Absent as absent:
            journal.end(cell.key, cell.labels | {"status": f"skipped: {absent}"})
            continue
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            journal.end(cell.key, cell.labels | {"status": f"failed: {text}"})
            if is_fault(error):
                raise SystemExit(FAULT_EXIT) from error
            continue
        journal.end(cell.key, {"status": "ok"} | row | {"at_s": [began_s, time.time()]})


def shard(cells: Iterable[Cell], index: int, count: int) -> list[Cell]:
    """Every `count`-th cell from `index` on."""
    return [cell for i, cell in enumerate(cells) if i % count == index]
