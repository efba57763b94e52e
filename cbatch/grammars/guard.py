"""Whether grammars can be followed, found out where it can do no harm: in workers.

A grammar may take hours to compile, all memory, or the process with it, and no limit on its text
tells which does. One that ends its worker is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from functools import partial
from typing import NamedTuple

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.compiling import MAX_GIVEN_CHARS
from cbatch.grammars.schemas import FIELD
from cbatch.grammars.trial import LIMITS, MEMORY_BYTES, GrammarVerdict, try_out
from cbatch.workers import WorkerDiedError, WorkerPool

MAX_WORKERS = 2
MAX_BEGIN_S = 0.2  # of the engine's steps, for all choices of a call
_REMEMBERED = 512  # grammars and what became of them
_REMEMBERED_CHARS = 2**21  # of those that were converted
_REMEDY = "use a simpler grammar"


class TriedGrammar(NamedTuple):
    """The same, as an engine compiles it soonest, and seconds of processor time that this takes."""

    asked: StructuredOutputs
    compile_s: float


class GrammarsBusyError(RuntimeError):
    """An owner has as many grammars waiting as it may."""


class GrammarGuard:
    """For the coroutines of one event loop. An owner, such as an API key, keeps one worker busy at
    a time, and may have `max_waiting` grammars on their way; nobody in particular all workers."""

    def __init__(self, workers: WorkerPool, *, max_waiting: int = 8) -> None:
        self._workers, self._max_waiting = workers, max_waiting
        self._free = asyncio.Semaphore(MAX_WORKERS)
        self._turns: dict[str, asyncio.Lock] = {}  # by owner, of those that wait
        self._waiting: Counter[str] = Counter()
        self._known: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._known_chars = 0
        self._asked: dict[bytes, asyncio.Task[GrammarVerdict]] = {}

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
        return TriedGrammar(verdict.quick or asked, verdict.compile_s)

    async def close(self) -> None:
        """Nothing may be asked any more."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    async def _verdict(self, asked: StructuredOutputs, owner: str | None) -> GrammarVerdict:
        key = hashlib.sha256(msgspec.json.encode(asked)).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        task = self._asked.get(key)
        if task is None:
            task = asyncio.create_task(self._find_out(asked, owner))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._remember(key, done))
        return await asyncio.shield(task)  # others may wait for it, too

    def _remember(self, key: bytes, done: asyncio.Task[GrammarVerdict]) -> None:
        del self._asked[key]
        if not done.cancelled() and done.exception() is None:
            self._known[key] = done.result()
            self._known_chars += done.result().num_chars
            while len(self._known) > _REMEMBERED or self._known_chars > _REMEMBERED_CHARS:
                _, forgotten = self._known.popitem(last=False)
                self._known_chars -= forgotten.num_chars

    async def _find_out(self, asked: StructuredOutputs, owner: str | None) -> GrammarVerdict:
        if owner is None:
            async with self._free:
                return await self._ask(asked)
        if self._waiting[owner] >= self._max_waiting:
            raise GrammarsBusyError(f"{self._waiting[owner]} grammars of this key are on their way")
        self._waiting[owner] += 1
        try:
            async with self._turns.setdefault(owner, asyncio.Lock()), self._free:
                return await self._ask(asked)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._turns[owner]

    async def _ask(self, asked: StructuredOutputs) -> GrammarVerdict:
        try:
            return await self._workers.run(partial(try_out, asked), LIMITS)
        except WorkerDiedError as error:
            return GrammarVerdict(_cause(error), _REMEDY)


def _require_size(asked: StructuredOutputs, field: str) -> None:
    texts = (asked.json, asked.regex, asked.grammar, asked.around, *(asked.choice or ()))
    for text in texts:
        if isinstance(text, str) and len(text) > MAX_GIVEN_CHARS:
            raise FieldError(field, f"has {len(text)} characters", f"use <= {MAX_GIVEN_CHARS}")


def _cause(error: WorkerDiedError) -> str:
    if error.overran:
        return f"takes more than {LIMITS.cpu_s:g} s to compile"
    return f"nests too deeply to be compiled, or takes more than {MEMORY_BYTES // 2**20} MiB"
