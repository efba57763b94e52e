"""Whether grammars can be followed, found out where it can do no harm: in processes of their own.

A grammar may take hours to compile, all memory, or the process with it, and no limit on its text
tells which does. What dies or takes too long is replaced, and its grammar refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import NamedTuple

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.compiling import FIELD, MAX_GRAMMAR_CHARS
from cbatch.grammars.worker import COMPILE_S, LENGTH, MEMORY_BYTES, GrammarVerdict, Setup, frame

MAX_WORKERS = 2
MAX_BEGIN_S = 0.2  # of the engine's steps, for all choices of a call
WORKER = ("-m", "cbatch.grammars.worker")
# Arenas of threads would count against the limit on memory; what is freed is to be given back.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18)}
SPARE_S = 10.0  # a worker beside an idle one is kept for as long
_WALL_S = 20.0  # for a grammar on a machine where its processor time takes as long
_START_S = 120.0
_REMEMBERED = 512  # grammars and what became of them
_REMEMBERED_CHARS = 2**21  # of those that were converted
_REMEDY = "use a simpler grammar"


class TriedGrammar(NamedTuple):
    """The same, as an engine compiles it soonest, and seconds of processor time that this takes."""

    asked: StructuredOutputs
    compile_s: float


class GrammarsBusyError(RuntimeError):
    """An owner has as many grammars waiting as it may."""


class WorkerDiedError(RuntimeError):
    """`status` as `asyncio` has it: below 0 it was a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with status {status}")
        self.status = status


class GrammarGuard:
    """For the coroutines of one event loop. An owner, such as an API key, keeps one worker busy at
    a time, and may have `max_waiting` grammars on their way; nobody in particular all workers."""

    def __init__(self, setup: Setup, *, max_waiting: int = 8) -> None:
        self._setup, self._max_waiting = setup, max_waiting
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(MAX_WORKERS)
        self._turns: dict[str, asyncio.Lock] = {}  # by owner, of those that wait
        self._waiting: Counter[str] = Counter()
        self._known: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._known_chars = 0
        self._asked: dict[bytes, asyncio.Task[GrammarVerdict]] = {}
        self._warming: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # workers that have been killed

    def warm(self) -> None:
        """Starts a worker, so that nobody has to wait for it later."""
        self._warming = asyncio.create_task(self._warm())

    async def check(
        self,
        asked: StructuredOutputs,
        *,
        num_choices: int = 1,
        field: str = FIELD,
        owner: str | None = None,
    ) -> TriedGrammar:
        """Raises `FieldError` about `field` for what cannot be honoured, `GrammarsBusyError`."""
        _require_size(asked, field)
        verdict = await self._verdict(asked, owner)
        if verdict.problem is not None:
            raise FieldError(field, verdict.problem, verdict.remedy)
        if verdict.begin_s * num_choices > MAX_BEGIN_S:
            problem = f"takes {verdict.begin_s:.2f} s to begin, for each choice"
            raise FieldError(field, problem, f"{_REMEDY}, or ask for fewer choices")
        quick = asked
        if verdict.lark is not None:
            quick = msgspec.structs.replace(asked, grammar=verdict.lark)
        return TriedGrammar(quick, verdict.compile_s)

    async def close(self) -> None:
        """Ends the processes. Nothing may be asked any more."""
        tasks = [*self._asked.values(), *([self._warming] if self._warming else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)
        for worker in self._idle:
            await worker.end()

    async def _verdict(self, asked: StructuredOutputs, owner: str | None) -> GrammarVerdict:
        content = msgspec.json.encode(asked)
        key = hashlib.sha256(content).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        task = self._asked.get(key)
        if task is None:
            task = asyncio.create_task(self._find_out(content, owner))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._remember(key, done))
        return await asyncio.shield(task)  # others may wait for it, too

    def _remember(self, key: bytes, done: asyncio.Task[GrammarVerdict]) -> None:
        del self._asked[key]
        if not done.cancelled() and done.exception() is None:
            self._known[key] = done.result()
            self._known_chars += len(done.result().lark or "")
            while len(self._known) > _REMEMBERED or self._known_chars > _REMEMBERED_CHARS:
                _, forgotten = self._known.popitem(last=False)
                self._known_chars -= len(forgotten.lark or "")

    async def _find_out(self, content: bytes, owner: str | None) -> GrammarVerdict:
        if owner is None:
            async with self._free:
                return await self._ask(content)
        if self._waiting[owner] >= self._max_waiting:
            raise GrammarsBusyError(f"{self._waiting[owner]} grammars of this key are on their way")
        self._waiting[owner] += 1
        try:
            async with self._turns.setdefault(owner, asyncio.Lock()), self._free:
                return await self._ask(content)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._turns[owner]

    async def _ask(self, content: bytes) -> GrammarVerdict:
        worker = self._idle.pop() if self._idle else await _Worker.start(self._setup)
        try:
            verdict = await asyncio.wait_for(worker.ask(content), _WALL_S)
        except (WorkerDiedError, TimeoutError) as error:
            await worker.end()
            if worker.num_asked > 1:  # it may have died of what earlier ones have left
                return await self._ask(content)
            return GrammarVerdict(_cause(error), _REMEDY)
        except BaseException:
            await worker.end()
            raise
        self._idle.append(worker)
        if len(self._idle) > 1:
            asyncio.get_running_loop().call_later(SPARE_S, self._end_spare)
        return verdict

    def _end_spare(self) -> None:
        """All but one that wait for work."""
        spare, self._idle = self._idle[:-1], self._idle[-1:]
        for worker in spare:
            task = asyncio.create_task(worker.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _warm(self) -> None:
        async with self._free:
            if not self._idle:
                self._idle.append(await _Worker.start(self._setup))


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.num_asked = 0

    @classmethod
    async def start(cls, setup: Setup) -> _Worker:
        """Once it is ready. Raises `WorkerDiedError`, OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *WORKER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # how it dies is told by its status
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # signals of a terminal are not for it
        )
        worker = cls(process)
        try:
            await asyncio.wait_for(worker._exchange(msgspec.json.encode(setup)), _START_S)
        except BaseException:
            await worker.end()
            raise
        return worker

    async def ask(self, content: bytes) -> GrammarVerdict:
        """Raises `WorkerDiedError`."""
        self.num_asked += 1
        return msgspec.json.decode(await self._exchange(content), type=GrammarVerdict)

    async def _exchange(self, content: bytes) -> bytes:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(frame(content))
            await process.stdin.drain()
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            return await process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDiedError(await process.wait()) from error

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def _require_size(asked: StructuredOutputs, field: str) -> None:
    texts = (asked.json, asked.regex, asked.grammar, asked.around, *(asked.choice or ()))
    for text in texts:
        if isinstance(text, str) and len(text) > MAX_GRAMMAR_CHARS:
            raise FieldError(field, f"has {len(text)} characters", f"use <= {MAX_GRAMMAR_CHARS}")


def _cause(error: WorkerDiedError | TimeoutError) -> str:
    if isinstance(error, TimeoutError) or error.status == -signal.SIGPROF:
        return f"takes more than {COMPILE_S:g} s to compile"
    return f"nests too deeply to be compiled, or takes more than {MEMORY_BYTES // 2**20} MiB"
