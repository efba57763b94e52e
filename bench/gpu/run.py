"""The parts of a run as processes, each with its own time limit. Rows are written to disk at once.

A part starts when the parts it follows have ended. Parts run concurrently, and `turns` separates
their measurements. A process that dies loses its current cell; another continues after that cell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu.cells import NOT_REACHED, Journal, Row
from bench.gpu.turns import DeviceTurns

_POLL_S, WRITE_S = 0.2, 2.0
_SLACK_S = 2.0  # pause reserved between two parts
_MOST_RESTARTS = 4
_TAIL_BYTES = 20_000  # bytes at the end of a log that are kept

Rows = dict[str, dict[str, Row]]  # by part and cell
Write = Callable[[Rows, Row], None]  # takes all rows, and facts about the machine


class RunPart(NamedTuple):
    """The cells of one process, which does not start if less than `least_s` remains. Earlier parts
    leave this time for a `needed` part."""

    name: str
    command: tuple[str, ...]
    least_s: float
    most_s: float
    after: tuple[str, ...] = ()
    needed: bool = False


class _Running:
    def __init__(self, part: RunPart, folder: Path, turns: DeviceTurns, until_s: float) -> None:
        self.part, self.turns, self.until_s = part, turns, until_s
        self.journal = Journal(folder / f"{part.name}.jsonl")
        self.log = folder / f"{part.name}.log"
        self._restarts = self._reached = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.part.command, stdout=log, stderr=log, start_new_session=True
            )
        self.turns.begin(process.pid)
        return process

    def poll(self) -> bool:
        """Return True while the part runs. A part over its time limit is killed; a process that
        died is restarted if it made progress."""
        self.journal.read()
        code = self.process.poll()
        if code is None and time.monotonic() < self.until_s:
            return True
        self.end()
        if not code:
            return False
        states = [row["status"] for row in self.journal.rows.values()]
        before, self._reached = self._reached, sum(state != NOT_REACHED for state in states)
        self._restarts += 1
        too_late = time.monotonic() + self.part.least_s > self.until_s
        if self._reached > before and self._restarts <= _MOST_RESTARTS and not too_late:
            self.process = self._start()
            return True
        if not states:
            last_line = " ".join(self.tail().splitlines()[-1:])[:200]
            self.journal.write(
                rows={self.part.name: {"status": f"failed: exit {code}: {last_line}"}}
            )
        return False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # including its children
        self.process.wait()
        self.turns.end(self.process.pid)
        self.journal.read()

    def tail(self) -> str:
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


class GpuRun:
    """Runs parts. `write` is called with all rows every two seconds and at the end."""

    def __init__(self, folder: Path, seconds: float, write: Write) -> None:
        self.folder, self.turns, self._write = folder, DeviceTurns(folder), write
        self._until_s = time.monotonic() + seconds
        self._started: dict[str, _Running] = {}
        self._skipped: list[str] = []

    @property
    def rows(self) -> Rows:
        missing = {"status": "left out: not enough time"}
        return {name: ran.journal.rows for name, ran in self._started.items()} | {
            name: {name: missing} for name in self._skipped
        }

    @property
    def about(self) -> Row:
        """Return facts about the machine, collected from all parts."""
        about: Row = {}
        for ran in self._started.values():
            about = ran.journal.about | about
        return about

    @property
    def log(self) -> str:
        return "\n".join(f"##### {name}\n{ran.tail()}" for name, ran in self._started.items())

    def run(self, parts: Sequence[RunPart]) -> None:
        waiting, running = {part.name: part for part in parts}, set[str]()
        written_s = time.monotonic()
        try:
            while waiting or running:
                for part in list(waiting.values()):
                    # A measuring process stops only the parts that run already.
                    if not {*part.after} & (waiting.keys() | running) and self.turns.is_free():
                        del waiting[part.name]
                        self._begin(part, waiting, running)
                time.sleep(_POLL_S)
                for name in [name for name in running if not self._started[name].poll()]:
                    running.remove(name)
                    self.turns.announce(name)
                if time.monotonic() > written_s + WRITE_S:
                    self._write(self.rows, self.about)
                    written_s = time.monotonic()
        finally:
            for name in running:
                self._started[name].end()
            self._write(self.rows, self.about)

    def _begin(self, part: RunPart, waiting: dict[str, RunPart], running: set[str]) -> None:
        now_s = time.monotonic()
        reserved_s = sum(p.least_s + _SLACK_S for p in waiting.values() if p.needed)
        until_s = min(now_s + part.most_s, self._until_s - reserved_s)
        if until_s < now_s + part.least_s:
            self._skipped.append(part.name)
            self.turns.announce(part.name)
        else:
            self._started[part.name] = _Running(part, self.folder, self.turns, until_s)
            running.add(part.name)
