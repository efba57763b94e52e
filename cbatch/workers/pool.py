"""The processes that run tasks, as the process that has the tasks sees them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from cbatch.workers.worker import DIED, DONE, LENGTH, PID, RAISED, TaskLimits

WORKER = ("-m", "cbatch.workers.worker")
# Arenas of threads would count against the limit on memory; what is freed is to be given back; and
# threads do not survive a fork.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**18),
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",  # to make one takes memory, and without that it hangs
    "TOKENIZERS_PARALLELISM": "false",
}
MOST_IDLE = 2
# A worker whose task took longer is not used again, and gives all its memory back.
_QUICK_S = 0.5
_AT_ONCE_S = 0.02
_WALL = 10  # times the processor time of a task, on a machine where that takes as long
_START_S = 120.0
T = TypeVar("T")


class WorkerDiedError(RuntimeError):
    """A worker ended within its task. `overran`: by the limit on time."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker ended with status {status}")
        self.overran = status == -signal.SIGPROF


class PoolClosedError(RuntimeError):
    """A task was not done before its workers were closed."""


class WorkerPool:
    """For the coroutines of one event loop. The fork server starts with the first task, or with
    `warm`. `setup` makes there what every task is given. It is pickled; so are tasks, what they
    return and what they raise."""

    def __init__(self, setup: Callable[[], Any]) -> None:
        self._setup = setup
        self._server: asyncio.Task[_ForkServer] | None = None
        self._idle: dict[bool, list[_Worker]] = {False: [], True: []}  # by `TaskLimits.aside`
        self._closed = False

    async def warm(self) -> None:
        """Start the fork server, and a worker, so that no task waits for them later."""
        self._idle[False].append(await self._fork())

    async def run(self, task: Callable[[Any], T], limits: TaskLimits) -> T:
        """Return what `task` makes of what `setup` made. Raises what it raises, `WorkerDiedError`,
        and `PoolClosedError`."""
        content, idle = pickle.dumps((limits, task)), self._idle[limits.aside]
        worker = idle.pop() if idle else await self._fork()
        begin_s, kind, value = time.monotonic(), None, None
        try:
            async with asyncio.timeout(limits.cpu_s * _WALL):
                kind, value = await worker.ask(content)
        except (EOFError, ConnectionError):  # with the fork server
            kind, value = DIED, -signal.SIGKILL
        except TimeoutError:
            value = -signal.SIGPROF
        finally:
            took_s = time.monotonic() - begin_s
            has_room = len(idle) < MOST_IDLE and not self._closed
            if kind in (DONE, RAISED) and took_s < _QUICK_S and has_room:
                idle.append(worker)
            else:
                if kind is None:  # nobody waits for its task any longer
                    worker.kill()
                worker.close()
        if kind == DONE:
            return value  # type: ignore[no-any-return]
        if kind == RAISED:
            raise value
        if self._closed:
            raise PoolClosedError
        if worker.num_tasks > 1 and took_s < _AT_ONCE_S:  # it had died before
            return await self.run(task, limits)
        raise WorkerDiedError(value)

    async def close(self) -> None:
        """End all processes, and the tasks that run."""
        server, self._server, self._closed = self._server, None, True
        for worker in sum(self._idle.values(), []):
            worker.close()
        if server is not None:
            server.cancel()
            await _end(server)

    async def _fork(self) -> _Worker:
        for is_last in (False, True):
            if self._closed:
                raise PoolClosedError
            if self._server is None:
                self._server = asyncio.create_task(_ForkServer.start(self._setup))
            server = self._server
            try:
                return await (await asyncio.shield(server)).fork()
            except asyncio.CancelledError:
                if server.cancelled():  # by `close`
                    raise PoolClosedError from None
                raise
            except (OSError, EOFError):  # something has ended the fork server
                if self._server is server:
                    self._server = None
                    await _end(server)
                if is_last:
                    raise
        raise AssertionError


async def _end(server: asyncio.Task[_ForkServer]) -> None:
    """End one that has started, or wait for the end of one that failed to."""
    with suppress(asyncio.CancelledError, Exception):
        await (await server).end()


class _ForkServer:
    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control

    @classmethod
    async def start(cls, setup: Callable[[], Any]) -> _ForkServer:
        """Raises OSError, EOFError."""
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *WORKER,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # a status tells how a worker dies
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=(theirs.fileno(),),
            )
            undo.pop_all()
        server = cls(process, ours)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(pickle.dumps(setup))
            process.stdin.close()
            async with asyncio.timeout(_START_S):
                await process.stdout.readexactly(1)
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await server.end()
            raise
        return server

    async def fork(self) -> _Worker:
        """Raises OSError, EOFError."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [PID.pack(0)], [theirs.fileno()])
        worker = _Worker(*await asyncio.open_connection(sock=ours))
        try:
            _, pid = await worker.answer()
        except BaseException:
            worker.close()
            raise
        worker.kill = partial(self._kill, pid)
        return worker

    def _kill(self, pid: int) -> None:
        with suppress(OSError):  # it has ended, and its workers end with their connections
            self._control.send(PID.pack(pid))

    async def end(self) -> None:
        self._control.close()
        await self._process.communicate()  # to the end of what it has open


class _Worker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_tasks = 0
        self.close = writer.close
        self.kill: Callable[[], None]

    async def ask(self, content: bytes) -> tuple[int, Any]:
        """What became of a task. Raises EOFError where the fork server has ended."""
        self.num_tasks += 1
        self._writer.writelines((LENGTH.pack(len(content)), content))
        return await self.answer()

    async def answer(self) -> tuple[int, Any]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        kind, value = pickle.loads(await self._reader.readexactly(length))
        return kind, value
