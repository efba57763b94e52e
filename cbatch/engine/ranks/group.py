"""Rank 0's side of tensor parallelism: its executor, and the other ranks' processes.

Rank 0 sends `Start`, then `Probe` and `Serve`, then plans and `Reset`. The others answer `READY`,
then `LOADED`, and each plan with its result's `digest`.
"""

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
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import WatchedExecutor
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.backend import LoadRequest

if TYPE_CHECKING:
    from cbatch.runtime.rank_group import RankGroup


_EXIT_STATUS_S = 2.0  # maximum wait for the exit status of a process whose connection broke
_EXIT_S = 5.0  # time for a rank to end by itself before it is killed
# A rank has this process's module path, but does not run its main module.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from cbatch.engine.ranks.worker import main; main()"
_logger = logging.getLogger("cbatch")
OnLost = Callable[[str, signal.Signals | None], None]


class RanksLostError(RuntimeError):
    """A rank ended, or its result differs. All ranks have ended, and the engine must end."""


class _Health:
    """State of the other ranks. Watcher threads keep it, not `Ranks`, which can be collected."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.killed_by: signal.Signals | None = None
        self.closing = False
        self.on_lost: OnLost | None = None
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
        return self.closing or self.problem is not None

    def lose(self, problem: str, killed_by: signal.Signals | None = None) -> None:
        """Record a problem. Only the first problem counts; later problems follow from it."""
        with self._lock:
            if self.has_ended:
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
    """The processes of ranks 1 .. size - 1. They end with this object, `close`, or this process."""

    def __init__(self, size: int, request: LoadRequest, tokenizer: str | None) -> None:
        import torch

        self.size = size
        self._health = _Health()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="cbatch-ranks-"))
        parts = self._health, self._processes, self._connections, self._folder
        self._finalizer = weakref.finalize(self, _end, *parts)
        threads = torch.get_num_threads()
        try:
            for rank in range(1, size):
                self._begin(rank)
                start = Start(rank, size, self._folder, threads, request, tokenizer)
                self._connections[-1].send(start)
            self.expect_answer(READY)
            self.group = self._join()
        except BaseException:
            self.close()
            raise

    def _begin(self, rank: int) -> None:
        connection, remote = Pipe()
        program = _PROGRAM.format(path=sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(remote.fileno())],
            stdin=subprocess.PIPE,  # at its end of file, when this process is gone, the rank exits
            pass_fds=[remote.fileno()],
            # An interrupt from the terminal must reach this process only. And if this process dies
            # while a rank is stopped, the kernel sends SIGHUP to the rank's process group.
            process_group=0,
        )
        remote.close()
        self._processes.append(process)
        self._connections.append(connection)
        name, args = f"cbatch-rank-{rank}", (rank, process)
        threading.Thread(target=self._health.watch, args=args, name=name, daemon=True).start()

    def _join(self) -> RankGroup:
        from cbatch.runtime.rank_group import join

        return join(0, self.size, self._folder)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def on_lost(self, callback: OnLost) -> None:
        self._health.on_lost = callback
        if self._health.problem is not None:
            callback(self._health.problem, self._health.killed_by)

    @contextlib.contextmanager
    def on_all_ranks(self, message: Message) -> Iterator[None]:
        """Send a message to the other ranks; rank 0 does its part in the body of the `with`. After
        an exception in the body the other ranks would wait forever, so all ranks are ended. Raises
        `RanksLostError`."""
        if self._health.has_ended:
            raise self._lost()
        try:
            content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            for connection in self._connections:
                connection.send_bytes(content)
            yield
        except BaseException as error:
            if not isinstance(error, RanksLostError):
                self._await_exit_status(error)
            if not self._health.has_ended:
                _logger.error("rank 0 did not complete a step", exc_info=error)
            self._health.lose(f"not all ranks completed a step: {error!r}")
            self._finalizer()
            if not isinstance(error, Exception):
                raise
            raise self._lost() from error

    def expect_answer(self, expected: object) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            try:
                answer = connection.recv()
            except (EOFError, OSError) as error:
                self._await_exit_status(error)
                self._health.lose(f"rank {rank} does not respond")
                raise self._lost() from error
            if answer != expected:
                self._health.lose(f"rank {rank} computed {answer}, rank 0 {expected}")
                raise self._lost()

    def _await_exit_status(self, error: BaseException) -> None:
        """Wait a moment for the watcher to report the end of the rank whose connection broke."""
        until_s = time.monotonic() + (_EXIT_STATUS_S if isinstance(error, Exception) else 0)
        while not self._health.has_ended and time.monotonic() < until_s:
            time.sleep(0.01)

    def _lost(self) -> RanksLostError:
        problem = self._health.problem
        message = f"{problem}; all ranks stop" if problem else "the ranks were closed"
        return RanksLostError(message)

    def close(self) -> None:
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
    until_s = time.monotonic() + _EXIT_S
    for process in processes:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def end_engine(problem: str, killed_by: signal.Signals | None) -> None:
    """End this engine process with the signal that killed the lost rank, or else with status 1. The
    server, which restarts the engine, then sees the signal."""
    _logger.error("%s; the engine stops", problem)
    if killed_by is not None:
        os.kill(os.getpid(), killed_by)
    os._exit(1)


READY, LOADED = "ready", "loaded"


class Start(msgspec.Struct, frozen=True):
    """A rank's number and the models that it loads. The ranks connect by files in `folder`.
    `tokenizer` is the engine's option."""

    rank: int
    size: int
    folder: Path
    threads: int
    request: LoadRequest
    tokenizer: str | None


class Probe(msgspec.Struct, frozen=True):
    """Run the passes that test for batch invariance, which need all ranks."""


class Serve(msgspec.Struct, frozen=True):
    """Create the executor."""

    config: SchedulerConfig


class Reset(msgspec.Struct, frozen=True):
    """Reset the executor."""


Message = Start | Probe | Serve | Reset | StepPlan


def digest(result: StepResult) -> tuple[int, int]:
    """Return the step id and a checksum of the result, which must be equal in all ranks."""
    checksum = 0
    for part in (
        result.tokens,
        result.row_splits,
        result.num_drafted,
        result.num_accepted,
        result.status,
    ):
        checksum = zlib.crc32(part.tobytes(), checksum)
    return result.step_id, checksum


class RankedExecutor:
    """Runs plans on all ranks. They sample the same tokens from the same logits and noise, so only
    plans are sent; every step compares the ranks' results. After any fault all ranks end, and `run`
    and `reset` raise `RanksLostError`."""

    def __init__(self, rank0_executor: WatchedExecutor, ranks: Ranks) -> None:
        self.rank0_executor, self.ranks = rank0_executor, ranks
        self.check = rank0_executor.check

    def run(self, plan: StepPlan) -> StepResult:
        with self.ranks.on_all_ranks(plan):
            result = self.rank0_executor.run(plan)
            self.ranks.expect_answer(digest(result))
        return result

    def reset(self) -> None:
        with self.ranks.on_all_ranks(Reset()):
            self.rank0_executor.reset()

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Count this rank's progress. If another rank hangs, this rank hangs in the same pass."""
        self.rank0_executor.report_progress(counter)
