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
FORK_S = 10.0  # maximum wall time for a fork; a fork server that takes longer is replaced
T = TypeVar("T")


class WorkerDiedError(RuntimeError):
    """A worker ended during its task. `overran`: the task exceeded its time limit."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker ended with status {status}")
        self.overran = status == -signal.SIGPROF


class NoWorkerError(RuntimeError):
    """No worker can be started at present."""


class PoolClosedError(NoWorkerError):
    """The pool was closed before the task was done."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


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
        self._idle[False].append(await self._fork())

    async def run(self, task: Callable[[Any], T], limits: TaskLimits) -> T:
        """Run `task` in a worker, with the result of `setup` as its argument, and return its
        result. Raises what the task raises, `WorkerDiedError`, and `NoWorkerError`."""
        content, idle = pickle.dumps((limits, task)), self._idle[limits.aside]
        worker = idle.pop() if idle else await self._fork()
        begin_s, kind, value = time.monotonic(), None, None
        try:
            async with asyncio.timeout(limits.cpu_s * WALL):
                kind, value = await worker.ask(content)
        except TimeoutError:
            value = await self._end_late(worker)
        except (EOFError, ConnectionError):  # the fork server ended too
            kind, value = DIED, (-signal.SIGKILL, 1)
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
        server, self._server, self._closed = self._server, None, True
        self._drop_idle()
        if server is not None:
            server.cancel()
            await _end(server)

    async def _fork(self) -> _Worker:
        problem: Exception | None = None
        for _ in range(2):
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
            except (OSError, EOFError) as error:  # the fork server was killed or does not answer
                problem = error
                await self._replace(server)
        raise NoWorkerError(f"no worker process can be started ({problem!r})") from problem

    async def _replace(self, server: asyncio.Task[_ForkServer]) -> None:
        """End a fork server that failed, unless another task has; the next fork starts another."""
        if self._server is server:
            self._server = None
            self._drop_idle()  # their deaths would not be noticed
            await _end(server, at_once=True)

    async def _end_late(self, worker: _Worker) -> tuple[int, int]:
        """Kill a worker whose task takes too long, and return (status, number of tasks begun)."""
        server = self._server
        worker.kill()
        try:
            async with asyncio.timeout(FORK_S):
                kind, value = await worker.answer()
            return -signal.SIGPROF, value[1] if kind == DIED else worker.num_tasks
        except TimeoutError:  # its fork server does not answer, so the task may never have begun
            if server is not None:
                await self._replace(server)
            return -signal.SIGKILL, 0
        except Exception:  # an answer that was cut
            return -signal.SIGPROF, worker.num_tasks

    def _drop_idle(self) -> None:
        for workers in self._idle.values():
            while workers:
                workers.pop().close()


async def _end(server: asyncio.Task[_ForkServer], *, at_once: bool = False) -> None:
    """End a fork server, or wait until a start that failed has cleaned up."""
    with suppress(asyncio.CancelledError, Exception):
        await (await server).end(at_once=at_once)


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
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,  # exit statuses say how workers died
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=(child_end.fileno(),),
            )
            undo.pop_all()
        parent_end.setblocking(False)
        server = cls(process, parent_end)
        try:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(setup))
            process.stdin.close()
            async with asyncio.timeout(_START_S):
                if not await asyncio.get_running_loop().sock_recv(parent_end, 1):
                    raise EOFError("it ended at its start")
        except BaseException:
            await server.end(at_once=True)
            raise
        return server

    async def fork(self) -> _Worker:
        """Start a worker and return its connection. Raises `NoWorkerError` if the system allows no
        more processes, OSError or EOFError if this fork server has failed."""
        parent_end, child_end = socket.socketpair()
        with child_end, ExitStack() as undo:
            undo.callback(parent_end.close)
            socket.send_fds(self._control, [PID.pack(0)], [child_end.fileno()])
            undo.pop_all()
        worker = _Worker(*await asyncio.open_connection(sock=parent_end))
        try:
            async with asyncio.timeout(FORK_S):
                kind, value = await worker.answer()
            if kind == RAISED:
                raise NoWorkerError(f"no worker process can be started ({value})")
        except BaseException:
            worker.close()
            raise
        worker.kill = partial(self._kill, value)
        return worker

    def _kill(self, pid: int) -> None:
        with suppress(OSError):  # the fork server ended; its workers end with their connections
            self._control.send(PID.pack(pid))

    async def end(self, *, at_once: bool = False) -> None:
        self._control.close()
        if not at_once:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), FORK_S)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class _Worker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_tasks = 0
        self.close = writer.close
        self.kill: Callable[[], None]

    async def ask(self, content: bytes) -> tuple[int, Any]:
        self.num_tasks += 1
        self._writer.writelines((LENGTH.pack(len(content)), content))
        return await self.answer()

    async def answer(self) -> tuple[int, Any]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        kind, value = pickle.loads(await self._reader.readexactly(length))
        return kind, value
