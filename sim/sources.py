"""When requests come: at the times of a trace, or when others have ended.

A replay asks a source for the next arrival, takes the request when its time has come, and tells the
source of every request that ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from cbatch.core.errors import FieldError
from sim.traces.request import TraceRequest


class Source(Protocol):
    def next_arrival_s(self) -> float | None:
        """Of the next request; None: nothing comes unless something ends first."""

    def take(self) -> tuple[int, TraceRequest]:
        """The request of `next_arrival_s`, with that arrival, and its place in the trace from 0."""

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """It finished or was refused."""


class OpenLoop:
    """Requests at their times. A session's later turn (one with a `think_s`) comes that long after
    the turn before it has ended, or at its own time if that is later. Reads one request ahead."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self._requests = iter(requests)
        self._coming: list[tuple[float, int, TraceRequest]] = []  # a heap
        self._num_read = 0
        self._ahead: int | None = None  # the one that was read ahead
        # By session in a turn: those that wait for its answer.
        self._open: dict[str, deque[tuple[int, TraceRequest]]] = {}
        self._read()

    def next_arrival_s(self) -> float | None:
        return self._coming[0][0] if self._coming else None

    def take(self) -> tuple[int, TraceRequest]:
        arrival_s, index, request = heapq.heappop(self._coming)
        if request.session is not None:
            self._open.setdefault(request.session, deque())
        if index == self._ahead:
            self._read()
        if arrival_s != request.arrival_s:
            request = msgspec.structs.replace(request, arrival_s=arrival_s)
        return index, request

    def ended(self, request: TraceRequest, now_s: float) -> None:
        if request.session is None or request.session not in self._open:
            return
        turns = self._open[request.session]
        if not turns:
            del self._open[request.session]
            return
        index, turn = turns.popleft()
        arrival_s = max(now_s + (turn.think_s or 0.0), turn.arrival_s)
        heapq.heappush(self._coming, (arrival_s, index, turn))

    def _read(self) -> None:
        """Up to the next request that waits for no other."""
        for request in self._requests:
            index, self._num_read = self._num_read, self._num_read + 1
            if request.think_s is not None and request.session in self._open:
                self._open[request.session].append((index, request))
                continue
            self._ahead = index
            heapq.heappush(self._coming, (request.arrival_s, index, request))
            return


class ClosedLoop:
    """`concurrency` clients that send the next request of a list as soon as their last has ended
    (and `think_s` have passed); the times in the list count for nothing."""

    def __init__(
        self, requests: Iterable[TraceRequest], concurrency: int, *, think_s: float = 0.0
    ) -> None:
        if concurrency < 1:
            raise FieldError("concurrency", f"{concurrency} is not allowed", "give at least 1")
        if not 0 <= think_s < float("inf"):
            raise FieldError("think_s", f"{think_s} is not allowed", "give 0 or more seconds")
        self._requests = iter(requests)
        self._think_s = think_s
        self._ready_s = [0.0] * concurrency  # a heap: when each idle client sends
        self._next = next(self._requests, None)
        self._num_taken = 0

    def next_arrival_s(self) -> float | None:
        return self._ready_s[0] if self._ready_s and self._next is not None else None

    def take(self) -> tuple[int, TraceRequest]:
        request, self._next = self._next, next(self._requests, None)
        index, self._num_taken = self._num_taken, self._num_taken + 1
        assert request is not None
        return index, msgspec.structs.replace(request, arrival_s=heapq.heappop(self._ready_s))

    def ended(self, request: TraceRequest, now_s: float) -> None:
        heapq.heappush(self._ready_s, now_s + self._think_s)
