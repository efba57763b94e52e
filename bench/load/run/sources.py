"""Sources that only the load tester has: clients that hold conversations, and ramps.

They implement `sim.workload.sources.Source`, on the real clock instead of a simulated one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from sim.workload.traces.request import TraceRequest


class ClosedSessions:
    """`concurrency` clients. Each takes the next request of the list, or all turns of the next
    session, and sends them one after another. It pauses between requests for the turn's
    `think_s`, or for the constructor's. The clients start one by one over `ramp_s`. Arrival times
    in the list are ignored."""

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
        # A heap of (time of the next send, client, remaining turns of its session).
        self._idle: list[tuple[float, int, deque[tuple[int, TraceRequest]]]] = [
            (ramp_s * client / concurrency, client, deque()) for client in range(concurrency)
        ]
        # By id of the request in flight: its client, and the remaining turns.
        self._busy: dict[int, tuple[int, deque[tuple[int, TraceRequest]]]] = {}
        self._next = next(self._requests, None)

    def next_arrival_s(self) -> float | None:
        if self._next is None:  # clients without remaining turns are done
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
        """Return the next request with the later turns of its session, which follow it in the
        list."""
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
    """Delay arrivals so that their rate grows linearly from 0 over `ramp_s` and is unchanged after.

    At rate r there should be r t^2 / (2 ramp_s) arrivals by t < ramp_s. So an arrival at s moves
    to the t with t^2 / (2 ramp_s) = s. Arrivals from s = ramp_s / 2 on move to s + ramp_s / 2."""
    for request in requests:
        due_s = request.arrival_s
        late_s = due_s + ramp_s / 2 if due_s >= ramp_s / 2 else math.sqrt(2 * ramp_s * due_s)
        yield replace(request, arrival_s=late_s)
