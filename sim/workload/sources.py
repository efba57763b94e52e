"""Sources of requests, which arrive at the times of a trace or when earlier requests have ended.

A replay asks a source for the next arrival, takes the request at that time, and reports to the
source every request that ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from cbatch.core.request.errors import FieldError
from sim.workload.traces.request import TraceRequest


class Source(Protocol):
    def next_arrival_s(self) -> float | None:
        """Return the time of the next request, or None if no request comes before another one
        ends."""

    def take(self) -> tuple[int, TraceRequest]:
        """Return the due request's place in the trace, from 0, and the request, whose `arrival_s`
        is the time at which its client sent it."""

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """Receive the end of a request, which finished or was refused."""


class _Session(msgspec.Struct):
    """A session. `num_open` of its requests are scheduled, waiting or running. Once these have
    ended, the first of `turns` is scheduled."""

    num_open: int = 0
    turns: deque[tuple[int, TraceRequest]] = msgspec.field(default_factory=deque)


class OpenLoop:
    """Requests at the times of a trace. A session's later turn (with a `think_s`) comes `think_s`
    after all earlier turns have ended, but not before its own time. One request is read ahead."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self._requests = iter(requests)
        self._scheduled: list[tuple[float, int, TraceRequest]] = []  # a heap
        self._num_read = 0
        self._ahead: int | None = None  # number of the request that was read ahead
        self._open: dict[str, _Session] = {}
        self._ended_s: dict[str, float] = {}  # end of each session that is not open
        self._read()

    def next_arrival_s(self) -> float | None:
        return self._scheduled[0][0] if self._scheduled else None

    def take(self) -> tuple[int, TraceRequest]:
        arrival_s, index, request = heapq.heappop(self._scheduled)
        if index == self._ahead:
            self._read()
        if arrival_s != request.arrival_s:
            request = msgspec.structs.replace(request, arrival_s=arrival_s)
        return index, request

    def ended(self, request: TraceRequest, now_s: float) -> None:
        if request.session is None:
            return
        session = self._open[request.session]
        session.num_open -= 1
        if session.num_open:
            return
        if not session.turns:
            del self._open[request.session]
            self._ended_s[request.session] = now_s
            return
        index, turn = session.turns.popleft()
        self._schedule(max(now_s + (turn.think_s or 0.0), turn.arrival_s), index, turn)

    def _schedule(self, arrival_s: float, index: int, request: TraceRequest) -> None:
        if request.session is not None:
            self._open.setdefault(request.session, _Session()).num_open += 1
        heapq.heappush(self._scheduled, (arrival_s, index, request))

    def _read(self) -> None:
        """Read up to the next request that arrives at its own time."""
        for request in self._requests:
            index, self._num_read = self._num_read, self._num_read + 1
            arrival_s = request.arrival_s
            if request.think_s is not None and request.session is not None:
                if request.session in self._open:
                    self._open[request.session].turns.append((index, request))
                    continue
                if request.session in self._ended_s:
                    arrival_s = max(self._ended_s[request.session] + request.think_s, arrival_s)
            self._schedule(arrival_s, index, request)
            if arrival_s == request.arrival_s:
                self._ahead = index
                return


class ClosedLoop:
    """`concurrency` clients. Each sends the next request of a list as soon as its last has ended
    and `think_s` have passed. Arrival times in the list are ignored."""

    def __init__(
        self, requests: Iterable[TraceRequest], concurrency: int, *, think_s: float = 0.0
    ) -> None:
        if concurrency < 1:
            raise FieldError("concurrency", f"{concurrency} is not allowed", "give at least 1")
        if not 0 <= think_s < float("inf"):
            raise FieldError("think_s", f"{think_s} is not allowed", "give 0 or more seconds")
        self._requests = iter(requests)
        self._think_s = think_s
        self._ready_s = [0.0] * concurrency  # a heap: when each idle client sends its next request
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


class Remote:
    """A source at a distance: a request reaches the scheduler `latency_s` after it was sent.
    `latency_s` includes the answer's way back. Measures count from the send."""

    def __init__(self, source: Source, latency_s: float) -> None:
        if not 0 <= latency_s < float("inf"):
            raise FieldError("latency", f"{latency_s} is not allowed", "give 0 or more seconds")
        self._source, self._latency_s = source, latency_s

    def next_arrival_s(self) -> float | None:
        sent_s = self._source.next_arrival_s()
        return None if sent_s is None else sent_s + self._latency_s

    def take(self) -> tuple[int, TraceRequest]:
        return self._source.take()

    def ended(self, request: TraceRequest, now_s: float) -> None:
        self._source.ended(request, now_s)
