"""Grammars are validated in worker processes, where they can do no harm.

A grammar may compile for hours, use all memory, or crash its process; no limit on its text prevents
that. A grammar that ends its worker is rejected.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars.compiling import MAX_GIVEN_CHARS, STACK_BYTES, Grammars, read, with_stack
from cbatch.grammars.schemas import FIELD
from cbatch.system.shares import NoPlaceError, Places
from cbatch.workers import TaskLimits, WorkerDiedError, WorkerPool

MEMORY_BYTES = 128 * 2**20  # for one grammar, on top of the stacks of the compiling threads
# Half of the 8 MiB of an engine's threads, which run compiled grammars: a margin, since the stack
# that a grammar needs grows with its text.
_TRIAL_STACK_BYTES = 4 * 2**20
LIMITS = TaskLimits(2.0, MEMORY_BYTES + STACK_BYTES + _TRIAL_STACK_BYTES, aside=True)


class GrammarVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a trial. `problem` and `remedy` are set for an invalid grammar. `converted` is
    the result of `read`, None if it equals the grammar. `compile_s` is the processor time to
    compile it. `start_s` is the time that an engine's step takes to start it for one choice."""

    problem: str | None = None
    remedy: str = ""
    converted: StructuredOutputs | None = None
    compile_s: float = 0.0
    start_s: float = 0.0

    @property
    def num_chars(self) -> int:
        spec = self.converted
        return 0 if spec is None else len(spec.json or spec.grammar or "")


class TrialState(Protocol):
    """The argument of every task, made by the fork server. `grammars` keeps no unused grammars."""

    grammars: Grammars


def try_out(spec: StructuredOutputs, state: TrialState) -> GrammarVerdict:
    """Test a grammar in a thread with a smaller stack than the engine's."""
    return with_stack(_TRIAL_STACK_BYTES, partial(_try_out, spec, state.grammars))


def _try_out(spec: StructuredOutputs, grammars: Grammars) -> GrammarVerdict:
    try:
        converted = read(spec)
        compile_s = -time.process_time()  # compiling runs in its own thread
        compiled = grammars.compiled(converted)
        compile_s += time.process_time()  # rounded to the kernel's ticks while a CPU limit is set
        start_s = -time.thread_time()
        compiled.matcher.deep_copy().compute_bitmask()
        start_s += time.thread_time()
    except FieldError as error:
        return GrammarVerdict(error.problem, error.remedy)
    changed = None if converted is spec else converted
    return GrammarVerdict(converted=changed, compile_s=compile_s, start_s=start_s)


MAX_WORKERS = 2
WAIT_S = 30.0  # longest wait before a grammar is validated
MAX_START_S = 0.2  # time that starting a grammar for all choices may add to the engine's step
_MAX_VERDICTS = 512  # cached verdicts
MAX_CACHED_CHARS = 2**21  # of all converted grammars in the cached verdicts
_REMEDY = "use a simpler grammar"


class ValidatedGrammar(NamedTuple):
    """A valid grammar, converted for fast compilation, and the processor seconds to compile it."""

    spec: StructuredOutputs
    compile_s: float


class GrammarsBusyError(RuntimeError):
    """An owner already has the maximum number of pending grammars, or no worker became free."""


class GrammarValidator:
    """Validate grammars for the coroutines of one event loop. An owner, such as an API key, takes
    turns with others (see `Places`), and may have `max_waiting` grammars pending."""

    def __init__(self, workers: WorkerPool, *, max_waiting: int = 8) -> None:
        self._workers, self._max_waiting = workers, max_waiting
        self._places = Places(MAX_WORKERS)
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._cached_chars = 0
        self._tasks: dict[bytes, asyncio.Task[GrammarVerdict]] = {}

    async def check(
        self,
        spec: StructuredOutputs,
        *,
        num_choices: int = 1,
        field: str = FIELD,
        owner: str | None = None,
    ) -> ValidatedGrammar:
        """Validate a grammar. Raises `FieldError` about `field`, and `GrammarsBusyError`."""
        _require_size(spec, field)
        verdict = await self._verdict(spec, owner)
        if verdict.problem is not None:
            raise FieldError(field, verdict.problem, verdict.remedy)
        if verdict.start_s * num_choices > MAX_START_S:
            problem = f"takes {verdict.start_s:.2f} s to start, for each choice"
            raise FieldError(field, problem, f"{_REMEDY}, or ask for fewer choices")
        return ValidatedGrammar(verdict.converted or spec, verdict.compile_s)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _verdict(self, spec: StructuredOutputs, owner: str | None) -> GrammarVerdict:
        key = hashlib.sha256(msgspec.json.encode(spec)).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.create_task(self._validate(spec, owner))
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._remember(key, done))
        return await asyncio.shield(task)  # other requests may wait for the same grammar

    def _remember(self, key: bytes, done: asyncio.Task[GrammarVerdict]) -> None:
        del self._tasks[key]
        if not done.cancelled() and done.exception() is None:
            self._verdicts[key] = done.result()
            self._cached_chars += done.result().num_chars
            while len(self._verdicts) > _MAX_VERDICTS or self._cached_chars > MAX_CACHED_CHARS:
                _, forgotten = self._verdicts.popitem(last=False)
                self._cached_chars -= forgotten.num_chars

    async def _validate(self, spec: StructuredOutputs, owner: str | None) -> GrammarVerdict:
        num_open = self._places.num_open(owner)
        if owner is not None and num_open >= self._max_waiting:
            raise GrammarsBusyError(f"{num_open} grammars of this key are being compiled")
        try:
            async with self._places.place(owner, WAIT_S):
                return await self._run(spec)
        except NoPlaceError as error:
            raise GrammarsBusyError(f"grammars are being compiled; {error}") from error

    async def _run(self, spec: StructuredOutputs) -> GrammarVerdict:
        try:
            return await self._workers.run(partial(try_out, spec), LIMITS)
        except WorkerDiedError as error:
            return GrammarVerdict(_cause(error), _REMEDY)


def _require_size(spec: StructuredOutputs, field: str) -> None:
    texts = (spec.json, spec.regex, spec.grammar, spec.around, *(spec.choice or ()))
    for text in texts:
        if isinstance(text, str) and len(text) > MAX_GIVEN_CHARS:
            raise FieldError(field, f"has {len(text)} characters", f"use <= {MAX_GIVEN_CHARS}")


def _cause(error: WorkerDiedError) -> str:
    if error.overran:
        return f"takes more than {LIMITS.cpu_s:g} s to compile"
    return f"is nested too deeply, or needs more than {MEMORY_BYTES // 2**20} MiB"
