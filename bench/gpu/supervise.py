"""Sections in processes of their own. A kernel that faults loses the device for its process: the
next process goes on behind the cell that did it. What hangs is ended, what is compiled by many
processes at once is compiled sooner, and no section takes the time of the next."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu.cells import Journal, Row

SHARDS = 6
GRACE_S, _POLL_S = 3.0, 0.2
_CELL_S = 100.0  # no cell takes so long, compilation included, unless it hangs
_MOST_RESTARTS = 6
_START_S = 15.0  # a process is not worth starting for less


class SectionPlan(NamedTuple):
    """How a section runs: many processes with shares of the cells, or one after many have compiled
    what it times."""

    section: str
    seconds: float
    shards: int = 1
    warms: bool = False


class Shard(NamedTuple):
    index: int
    count: int
    warming: bool

    def journal(self, out: Path, section: str) -> Path:
        if self.warming:
            return out / "warming" / f"{section}.{self.index}.jsonl"
        return out / (f"{section}.{self.index}.jsonl" if self.count > 1 else f"{section}.jsonl")


Command = Callable[[str, Shard, float], Sequence[str]]  # of section, shard, seconds


def child_command(out: Path, peers: Path | None) -> Command:
    def command(section: str, shard: Shard, seconds: float) -> list[str]:
        words = [sys.executable, "-m", "bench.gpu", "--out", str(out), "--section", section]
        words += ["--child", f"{shard.index}/{shard.count}", "--seconds", f"{seconds:.1f}"]
        words += ["--warming"] if shard.warming else []
        return words + (["--peers", str(peers)] if peers else [])

    return command


def run_section(plan: SectionPlan, out: Path, command: Command) -> None:
    """Run it within its seconds, whatever its processes do. Rows are in the journals."""
    deadline_s = time.monotonic() + plan.seconds
    if plan.warms:
        shards = [Shard(i, SHARDS, True) for i in range(SHARDS)]
        _watch(plan.section, shards, out, command, time.monotonic() + 0.4 * plan.seconds)
    shards = [Shard(i, plan.shards, False) for i in range(plan.shards)]
    _watch(plan.section, shards, out, command, deadline_s)


class _SectionProcess:
    def __init__(
        self, section: str, shard: Shard, out: Path, command: Command, deadline_s: float
    ) -> None:
        self.path = shard.journal(out, section)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.restarts, self.deadline_s = 0, deadline_s
        # So many processes with a thread for each core would only wait for one another.
        threads = max(1, (os.cpu_count() or 1) // shard.count)
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._command = lambda: command(section, shard, deadline_s - time.monotonic())
        self.process = self._start()
        self._moved_s, self._size, self._rows = time.monotonic(), -1, 0

    def _start(self) -> subprocess.Popen[bytes]:
        with self.path.with_suffix(".log").open("a") as log:
            return subprocess.Popen(
                self._command(),
                env=self._environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Whether it goes on; ends it, or starts it again, if need be."""
        code, now_s = self.process.poll(), time.monotonic()
        if code == 0:
            return False
        if code is not None:
            return self._again(f"crashed: {_exit_text(code)}", now_s)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            self._moved_s, self._size = now_s, size
        if now_s > self.deadline_s + GRACE_S:
            self._end()
            Journal(self.path).abandon("cut off: the section's time was up")
            return False
        if now_s > self._moved_s + _CELL_S:
            self._end()
            return self._again(f"hung: no row for {_CELL_S:.0f} s", now_s)
        return True

    def _again(self, status: str, now_s: float) -> bool:
        """Start behind the cell that the process ended in. One that has left no row since its start
        is not started again."""
        journal = Journal(self.path)
        journal.abandon(status)
        rows, self._rows = self._rows, len(journal.rows)
        self.restarts += 1
        late = now_s + _START_S > self.deadline_s
        if self._rows == rows or self.restarts > _MOST_RESTARTS or late:
            return False
        self.process = self._start()
        self._moved_s = now_s
        return True

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with whatever it has started
        self.process.wait()


def _watch(
    section: str, shards: Sequence[Shard], out: Path, command: Command, deadline_s: float
) -> None:
    children = [_SectionProcess(section, shard, out, command, deadline_s) for shard in shards]
    try:
        while children:
            children = [child for child in children if child.poll()]
            time.sleep(_POLL_S)
    finally:
        for child in children:
            child._end()


def _exit_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def rows_of(out: Path, section: str) -> dict[str, Row]:
    """What all processes of a section have written, by cell."""
    found: dict[str, Row] = {}
    for path in sorted(out.glob(f"{section}*.jsonl")):
        if path.name.split(".")[0] == section:
            found |= Journal(path).rows
    return found
