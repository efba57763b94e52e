"""Who sends when, beside the simulator's own sources: clients that hold conversations, and ramps.

A run asks its source as a replay does (`sim.workload.sources.Source`); only the clock is another.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from sim.traces.request import TraceRequest


class ClosedSessions:
    """`concurrency` clients; each sends a request, or all turns of a session one by one, and then
    goes on to the next. It pauses for a turn's own `think_s`, else for that of the clients. They
    begin one by one over `ramp_s`. The times in the list count for nothing."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        concurrency: int,
        *,
        think_s: float = 0.0,
        ramp_s: float = 0.0,
    ) -> None:
        self._requests = enumerate(requests)
        self._think_s = think_s
        # A heap of (when, client, the turns that it has left).
        self._idle: list[tuple[float, int, deque[tuple[int, TraceRequest]]]] = [
            (ramp_s * client / concurrency, client, deque()) for client in range(concurrency)
        ]
        self._busy: dict[int, tuple[int, deque[tuple[int, TraceRequest]]]] = {}  # by request
        self._next = next(self._requests, None)

    def next_arrival_s(self) -> float | None:
        if self._next is None:  # those without turns left have nothing to do any more
            while self._idle and not self._idle[0][2]:
                heapq.heappop(self._idle)
        return self._idle[0][0] if self._idle else None

    def take(self) -> tuple[int, TraceRequest]:
        now_s, client, turns = heapq.heappop(self._idle)
        if not turns:
            turns = self._conversation()
        index, request = turns.popleft()
        request = replace(request, arrival_s=now_s)
        self._busy[id(request)] = (client, turns)
        return index, request

    def ended(self, request: TraceRequest, now_s: float) -> None:
        client, turns = self._busy.pop(id(request))
        think_s = turns[0][1].think_s if turns else None
        pause_s = self._think_s if think_s is None else think_s
        heapq.heappush(self._idle, (now_s + pause_s, client, turns))

    def _conversation(self) -> deque[tuple[int, TraceRequest]]:
        """The next request and the turns after it, which follow it in the list."""
        assert self._next is not None
        turns = deque([self._next])
        session = self._next[1].session
        self._next = next(self._requests, None)
        while (
            session is not None
            and self._next is not None
            and self._next[1].session == session
            and self._next[1].think_s is not None
        ):
            turns.append(self._next)
            self._next = next(self._requests, None)
        return turns


def ramped(requests: Iterable[TraceRequest], ramp_s: float) -> Iterator[TraceRequest]:
    """The same arrivals in operational time: their rate grows linearly from 0 over `ramp_s`, and is
    what it was from there on. A process of rate r has r t^2 / (2 ramp) arrivals by t < ramp."""
    for request in requests:
        due_s = request.arrival_s
        late_s = due_s + ramp_s / 2 if due_s >= ramp_s / 2 else math.sqrt(2 * ramp_s * due_s)
        yield replace(request, arrival_s=late_s)
