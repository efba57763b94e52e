"""Requests that wait until their grammar is compiled, while the engine's steps go on."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.grammars import Compiled, Grammars, grammars_unsupported
from cbatch.system.shares import SharedLimit

MAX_GRAMMARS = 32  # compiled grammars kept at once; each may take tens of MiB
QUICK_CPU_S = 0.05  # processor time below which a grammar is quick; an ordinary schema takes 1 ms
_NICE = 10  # niceness of the thread for slow grammars, so that steps take precedence


class Waiting(NamedTuple):
    request: Request
    output: tuple[int, ...]


class GrammarQueue:
    """Compiles grammars in the order of requests, so that no step waits for compiling, and keeps
    each grammar until its last request has left. Owners share the number of grammars. Slow grammars
    have their own thread with a lower priority, so that quick grammars do not wait for them."""

    def __init__(
        self, grammars: Grammars | None, report_compiling: Callable[[Collection[str]], None]
    ) -> None:
        """`report_compiling` receives the ids of the requests whose grammars are being compiled."""
        self._grammars, self._report_compiling = grammars, report_compiling
        self._compiling: dict[str, None] = {}  # request ids
        self._lock = threading.Lock()  # guards `_compiling`
        self._waiting: dict[str, Waiting] = {}  # by request id
        self._specs: dict[str, StructuredOutputs] = {}  # of waiting and running requests, by id
        self._num_users: Counter[StructuredOutputs] = Counter()
        self._compiled: dict[StructuredOutputs, Future[Compiled]] = {}
        self._kept = SharedLimit(MAX_GRAMMARS, "grammars")
        self._owners: dict[StructuredOutputs, str | None] = {}  # of compiled grammars
        self._quick = ThreadPoolExecutor(1, "cbatch-grammars")
        self._slow = ThreadPoolExecutor(1, "cbatch-slow-grammars", _lower_priority)

    @property
    def waiting(self) -> bool:
        """True if any request waits."""
        return bool(self._waiting)

    def enter(self, request: Request, output: tuple[int, ...]) -> None:
        """Queue a request. `output`: the tokens that a resumed request has already emitted."""
        spec = request.params.structured_outputs
        assert spec is not None
        self._waiting[request.request_id] = Waiting(request, output)
        self._specs[request.request_id] = spec
        self._num_users[spec] += 1
        self._compile_next()

    def leave(self, request_id: str) -> None:
        """Remove a request that has ended or was cancelled."""
        spec = self._specs.pop(request_id, None)
        if spec is None:
            return
        self._waiting.pop(request_id, None)
        self._num_users[spec] -= 1
        if not self._num_users[spec]:
            del self._num_users[spec]
            if spec in self._compiled:
                self._compiled.pop(spec).cancel()
                self._kept.add(-1, self._owners.pop(spec))
            self._compile_next()

    def take_ready(self) -> Iterator[tuple[Request, tuple[int, ...], BaseException | None]]:
        """Yield the requests whose grammar is compiled or failed, with the exception or None."""
        for request_id, (request, output) in list(self._waiting.items()):
            compiled = self._compiled.get(self._specs[request_id])
            if compiled is not None and compiled.done():
                del self._waiting[request_id]
                yield request, output, compiled.exception()

    def _compile_next(self) -> None:
        for request_id, (request, _) in self._waiting.items():
            spec, owner = self._specs[request_id], request.owner
            if spec not in self._compiled and self._kept.problem(1, owner) is None:
                self._kept.add(1, owner)
                self._owners[spec] = owner
                thread = self._quick if request.compile_s < QUICK_CPU_S else self._slow
                self._compiled[spec] = thread.submit(self._compile, spec, request_id)

    def _compile(self, spec: StructuredOutputs, request_id: str) -> Compiled:
        if self._grammars is None:
            raise grammars_unsupported()
        with self._lock:
            self._compiling[request_id] = None
            self._report_compiling(self._compiling)
        try:
            return self._grammars.compiled(spec)
        finally:
            with self._lock:
                del self._compiling[request_id]
                self._report_compiling(self._compiling)


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # not all systems have priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
