"""The client side of the worker processes: hands out tasks and replaces workers that died."""

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
# One malloc arena, because each thread's arena counts against the memory limit. A fixed mmap
# threshold, so that freed memory returns to the system. No extra threads: they do not survive a
# fork.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**18),
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",  # a backtrace needs memory, and hangs when there is none
    "TOKENIZERS_PARALLELISM": "false",
}
MAX_IDLE = 2  # idle workers kept for later tasks, for each value of `TaskLimits.aside`
# Wall time of a task: after a longer task its worker ends, so that all its memory is returned.
_QUICK_S = 0.5
WALL = 10  # wall time allowed to a task, as a multiple of its processor time.
_START_S = 120.0  # maximum wall time for the start of the fork server
T = TypeVar("T")


class WorkerDiedError(RuntimeError):
    """A worker ended during its task. `overran`: the task exceeded its time limit."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker ended with status {status}")
        self.overran = status == -signal.SIGPROF


class PoolClosedError(RuntimeError):
    """The pool was closed before the task was done."""


class WorkerPool:
    """Worker processes for the coroutines of one event loop. The fork server starts with the first
    task, or with `warm`. The fork server calls `setup` once; every task gets the result as its
    argument. `setup`, tasks, results and exceptions are pickled."""

    def __init__(self, setup: Callable[[], Any]) -> None:
        self._setup = setup
        self._server: asyncio.Task[_ForkServer] | None = None
        self._idle: dict[bool, list[_Worker]] = {False: [], True: []}  # by `TaskLimits.aside`
        self._closed = False

    async def warm(self) -> None:
        """Start the fork server and one worker, so that the first task does not wait for them."""
        self._idle[False].append(await self._fork())

    async def run(self, task: Callable[[Any], T], limits: TaskLimits) -> T:
        """Run `task` in a worker, with the result of `setup` as its argument, and return its
        result. Raises what the task raises, `WorkerDiedError`, and `PoolClosedError`."""
        content, idle = pickle.dumps((limits, task)), self._idle[limits.aside]
        worker = idle.pop() if idle else await self._fork()
        begin_s, kind, value = time.monotonic(), None, None
        try:
            async with asyncio.timeout(limits.cpu_s * WALL):
                kind, value = await worker.ask(content)
        except (EOFError, ConnectionError):  # the fork server ended too
            kind, value = DIED, (-signal.SIGKILL, 1)
        except TimeoutError:
            value = (-signal.SIGPROF, worker.num_tasks)
        finally:
            took_s = time.monotonic() - begin_s
            has_room = len(idle) < MAX_IDLE and not self._closed
            if kind in (DONE, RAISED) and took_s < _QUICK_S and has_room:
                idle.append(worker)
            else:
                if kind is None:  # timed out or cancelled; the task still runs
                    worker.kill()
                worker.close()
        if kind == DONE:
            return value  # type: ignore[no-any-return]
        if kind == RAISED:
            raise value
        if self._closed:
            raise PoolClosedError
        status, num_begun = value
        if num_begun < worker.num_tasks:  # the worker died before this task
            return await self.run(task, limits)
        raise WorkerDiedError(status)

    async def close(self) -> None:
        """End all processes, also those with running tasks."""
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
            except (OSError, EOFError):  # the fork server was killed
                if self._server is server:
                    self._server = None
                    await _end(server)
                if is_last:
                    raise
        raise AssertionError


async def _end(server: asyncio.Task[_ForkServer]) -> None:
    """End a fork server, or wait until a start that failed has cleaned up."""
    with suppress(asyncio.CancelledError, Exception):
        await (await server).end()


class _ForkServer:
    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control

    @classmethod
    async def start(cls, setup: Callable[[], Any]) -> _ForkServer:
        """Start the process and wait until `setup` has run there. Raises OSError, EOFError."""
        parent_end, child_end = socket.socketpair()
        with child_end, ExitStack() as undo:
            undo.callback(parent_end.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *WORKER,
                str(child_end.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # exit statuses say how workers died
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=(child_end.fileno(),),
            )
            undo.pop_all()
        server = cls(process, parent_end)
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
        """Start a worker and return its connection. Raises OSError, EOFError."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            socket.send_fds(self._control, [PID.pack(0)], [child_end.fileno()])
        worker = _Worker(*await asyncio.open_connection(sock=parent_end))
        try:
            _, pid = await worker.answer()
        except BaseException:
            worker.close()
            raise
        worker.kill = partial(self._kill, pid)
        return worker

    def _kill(self, pid: int) -> None:
        with suppress(OSError):  # the fork server ended; its workers end with their connections
            self._control.send(PID.pack(pid))

    async def end(self) -> None:
        self._control.close()
        await self._process.communicate()  # wait until it and its workers have ended


class _Worker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_tasks = 0
        self.close = writer.close
        self.kill: Callable[[], None]

    async def ask(self, content: bytes) -> tuple[int, Any]:
        """Send a task and return (kind, value). Raises EOFError if the fork server has ended."""
        self.num_tasks += 1
        self._writer.writelines((LENGTH.pack(len(content)), content))
        return await self.answer()

    async def answer(self) -> tuple[int, Any]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        kind, value = pickle.loads(await self._reader.readexactly(length))
        return kind, value
