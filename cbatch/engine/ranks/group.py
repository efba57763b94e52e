"""The processes of the other ranks, seen from rank 0, which starts them and ends with them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.engine.options import EngineOptions
from cbatch.engine.ranks.messages import READY, Message, RankFiles, Start

if TYPE_CHECKING:
    from cbatch.runtime.cpu.rank_group import RankGroup

_NOTICE_S = 2.0  # for the system to tell of a process that a connection was lost to
_LEAVE_S = 5.0  # for a rank to end by itself
# A rank finds modules where this process does, and takes no part of its main module.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from cbatch.engine.ranks.worker import main; main()"
_logger = logging.getLogger("cbatch")
OnLost = Callable[[str, signal.Signals | None], None]


class RanksLostError(RuntimeError):
    """A rank is gone, or out of step. The others have ended; so must the engine."""


class _Health:
    """What is known of the other ranks; their watchers hold it, and no more."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.killed_by: signal.Signals | None = None
        self.closing = False
        self.on_lost: OnLost | None = None
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        return self.closing or self.problem is not None

    def lose(self, problem: str, killed_by: signal.Signals | None = None) -> None:
        """The first problem counts: those behind it follow from it."""
        with self._lock:
            if self.over:
                return
            self.problem, self.killed_by = problem, killed_by
        if self.on_lost is not None:
            self.on_lost(problem, killed_by)

    def watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status >= 0:
            return self.lose(f"rank {rank} ended with status {status}")
        killed_by = signal.Signals(-status)
        return self.lose(f"rank {rank} was killed by {killed_by.name}", killed_by)


class Ranks:
    """Ranks 1 .. size - 1. They end with this object, with `close`, or with this process."""

    def __init__(
        self,
        size: int,
        files: RankFiles,
        options: EngineOptions,
        threads: int,
    ) -> None:
        """Returns once all are there. Raises `RanksLostError` where one does not come up."""
        self.size = size
        self._health = _Health()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="cbatch-ranks-"))
        parts = self._health, self._processes, self._connections, self._folder
        self._finalizer = weakref.finalize(self, _end, *parts)
        try:
            for rank in range(1, size):
                self._begin(rank)
                start = Start(rank, size, self._folder, threads, files, options)
                self._connections[-1].send(start)
            self.hear(READY)
            self.group = self._join()
        except BaseException:
            self.close()
            raise

    def _begin(self, rank: int) -> None:
        ours, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())],
            stdin=subprocess.PIPE,  # it ends where nobody holds the other end
            pass_fds=[theirs.fileno()],
            # Who interrupts this process means this one. And once it is gone, one that was stopped
            # is of a group that nobody can continue, which the system ends.
            process_group=0,
        )
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)
        name, args = f"cbatch-rank-{rank}", (rank, process)
        threading.Thread(target=self._health.watch, args=args, name=name, daemon=True).start()

    def _join(self) -> RankGroup:
        from cbatch.runtime.cpu.rank_group import join

        return join(0, self.size, self._folder)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def on_lost(self, tell: OnLost) -> None:
        """Called from another thread, at once, with what happened and by which signal."""
        self._health.on_lost = tell
        if self._health.problem is not None:
            tell(self._health.problem, self._health.killed_by)

    @contextlib.contextmanager
    def together(self, message: Message) -> Iterator[None]:
        """Rank 0's part in what a message makes all of them do. Whatever it raises leaves the
        others in the midst of it, and is the end of them: `RanksLostError`."""
        if self._health.over:
            raise self._lost()
        try:
            content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            for connection in self._connections:
                connection.send_bytes(content)
            yield
        except BaseException as error:
            if not isinstance(error, RanksLostError):
                self._await_notice(error)
            if not self._health.over:
                _logger.error("rank 0 did not end a step", exc_info=error)
            self._health.lose(f"a step was not ended by all ranks: {error!r}")
            self._finalizer()
            if not isinstance(error, Exception):
                raise
            raise self._lost() from error

    def hear(self, expected: object) -> None:
        """The answer of each, which must be that."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                heard = connection.recv()
            except (EOFError, OSError) as error:
                self._await_notice(error)
                self._health.lose(f"rank {rank} does not answer")
                raise self._lost() from error
            if heard != expected:
                self._health.lose(f"rank {rank} came to {heard}, rank 0 to {expected}")
                raise self._lost()

    def _await_notice(self, error: BaseException) -> None:
        """A connection that breaks is heard of sooner than the death of who held it."""
        until_s = time.monotonic() + (_NOTICE_S if isinstance(error, Exception) else 0)
        while not self._health.over and time.monotonic() < until_s:
            time.sleep(0.01)

    def _lost(self) -> RanksLostError:
        problem = self._health.problem
        told = f"{problem}; all ranks end with it" if problem else "the ranks were closed"
        return RanksLostError(told)

    def close(self) -> None:
        """Ends them. Idempotent."""
        self._finalizer()


def _end(
    health: _Health,
    processes: list[subprocess.Popen[bytes]],
    connections: list[Connection[Any, Any]],
    folder: Path,
) -> None:
    health.closing = True
    for connection in connections:
        connection.close()
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    until_s = time.monotonic() + _LEAVE_S
    for process in processes:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def end_engine(problem: str, killed_by: signal.Signals | None) -> None:
    """For an engine in a process of its own: it ends as its rank did, so that its owner, who starts
    it anew, is told the same."""
    _logger.error("%s; the engine ends with it", problem)
    if killed_by is not None:
        os.kill(os.getpid(), killed_by)
    os._exit(1)
