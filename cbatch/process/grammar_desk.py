"""Where requests wait whose grammar is being compiled, beside the steps of the engine."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from cbatch.core.request.request import Request, StructuredOutputs
from cbatch.grammars import Compiled, Grammars, not_served

MAX_HELD = 32  # grammars at once: one may take tens of MiB
QUICK_S = 0.05  # of processor time; an ordinary schema takes 1 ms
_NICE = 10  # steps go first


class Waiting(NamedTuple):
    request: Request
    output: tuple[int, ...]


class GrammarDesk:
    """Grammars are compiled one after another, in the order of requests, and held until the last
    request has left: in a step nobody has to wait for one. Those that were seen to take long wait
    for each other, and give way to steps; quick ones wait for quick ones alone."""

    def __init__(self, grammars: Grammars | None, note: Callable[[Collection[str]], None]) -> None:
        """`note` is told whose grammars are being compiled."""
        self._grammars, self._note = grammars, note
        self._compiling: dict[str, None] = {}  # request ids
        self._lock = threading.Lock()  # around those
        self._waiting: dict[str, Waiting] = {}  # by request id
        self._asked: dict[str, StructuredOutputs] = {}  # of those that wait, or follow one
        self._users: Counter[StructuredOutputs] = Counter()
        self._compiled: dict[StructuredOutputs, Future[Compiled]] = {}
        self._quick = ThreadPoolExecutor(1, "cbatch-grammars")
        self._slow = ThreadPoolExecutor(1, "cbatch-slow-grammars", _step_aside)

    @property
    def waiting(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def enter(self, request: Request, output: tuple[int, ...]) -> None:
        asked = request.params.structured_outputs
        assert asked is not None
        self._waiting[request.request_id] = Waiting(request, output)
        self._asked[request.request_id] = asked
        self._users[asked] += 1
        self._compile_next()

    def leave(self, request_id: str) -> None:
        """It has ended, or is not wanted any more."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        self._waiting.pop(request_id, None)
        self._users[asked] -= 1
        if not self._users[asked]:
            del self._users[asked]
            if asked in self._compiled:
                self._compiled.pop(asked).cancel()
            self._compile_next()

    def take_ready(self) -> Iterator[tuple[Request, tuple[int, ...], BaseException | None]]:
        """Those whose grammar is compiled, or what is wrong with it."""
        for request_id, (request, output) in list(self._waiting.items()):
            found = self._compiled.get(self._asked[request_id])
            if found is not None and found.done():
                del self._waiting[request_id]
                yield request, output, found.exception()

    def _compile_next(self) -> None:
        for request_id, (request, _) in self._waiting.items():
            asked = self._asked[request_id]
            if asked not in self._compiled and len(self._compiled) < MAX_HELD:
                thread = self._quick if request.compile_s < QUICK_S else self._slow
                self._compiled[asked] = thread.submit(self._compile, asked, request_id)

    def _compile(self, asked: StructuredOutputs, request_id: str) -> Compiled:
        if self._grammars is None:
            raise not_served()
        with self._lock:
            self._compiling[request_id] = None
            self._note(self._compiling)
        try:
            return self._grammars.compiled(asked)
        finally:
            with self._lock:
                del self._compiling[request_id]
                self._note(self._compiling)


def _step_aside() -> None:
    with suppress(OSError, AttributeError):  # where threads have no priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
