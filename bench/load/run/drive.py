"""A run: a source of requests, driven in real time against a server.

Nobody waits for an answer before the next request is sent, unless the source says so: the time at
which a request should have been sent is fixed by the source, and its latency counts from there.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import Bodies, BodySettings
from bench.load.client.call import CallError, LiveTally, TimedCall
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.sources import ClosedSessions
from sim.traces.changes import endless
from sim.traces.request import TraceRequest
from sim.workload.sources import OpenLoop, Source

HOPELESS = 100  # failures without one success, after which nothing more is sent
LAG_EVERY_S = 0.02


class PartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to do its part of a run. `indices[i]` is the place of `requests[i]`
    among the `total` of all processes."""

    endpoint: Endpoint
    bodies: BodySettings
    requests: tuple[TraceRequest, ...]
    indices: tuple[int, ...]
    total: int
    concurrency: int | None = None  # None: at the requests' own times
    think_s: float = 0.0
    ramp_s: float = 0.0  # of a closed loop
    end_s: float | None = None  # nothing is sent any more
    again: bool = False  # a closed loop begins its requests anew when they are all sent
    timeout_s: float = 600.0
    key: str | None = None

    def source(self) -> Source:
        if self.concurrency is None:
            return OpenLoop(self.requests)
        requests = list(self.requests)
        return ClosedSessions(
            endless(requests) if self.again else requests,
            self.concurrency,
            think_s=self.think_s,
            ramp_s=self.ramp_s,
        )

    def index(self, taken: int) -> int:
        again, at = divmod(taken, len(self.indices))
        return self.indices[at] + again * self.total


class Part(msgspec.Struct):
    """What one process saw. `lag_s` is how late its event loop was, now and then; `start_s` is the
    0 of the run, on the monotonic clock."""

    calls: list[Any]  # of `TimedCall`
    unfinished: int
    hopeless: bool
    cpu_s: float
    elapsed_s: float
    lag_s: list[float]
    start_s: float = 0.0


async def drive(
    plan: PartPlan, *, start_s: float, stop: asyncio.Event, tally: LiveTally | None = None
) -> Part:
    """`start_s` is the 0 of the run, on the monotonic clock. When `stop` is set what is under way
    is given up."""
    clock: Callable[[], float] = lambda: time.monotonic() - start_s  # noqa: E731
    client = HttpClient(plan.endpoint, key=plan.key, timeout_s=plan.timeout_s, clock=clock)
    driver = _Driver(plan, client, clock, tally or LiveTally())
    cpu_s = time.process_time()
    try:
        await driver.run(stop)
    finally:
        client.close()
    cpu_s, lag_s = time.process_time() - cpu_s, driver.lag_s.tolist()
    return Part(driver.calls, driver.unfinished, driver.hopeless, cpu_s, clock(), lag_s, start_s)


class _Driver:
    def __init__(
        self, plan: PartPlan, client: HttpClient, clock: Callable[[], float], tally: LiveTally
    ) -> None:
        self._plan, self._client, self._clock, self._tally = plan, client, clock, tally
        self._source, self._bodies = plan.source(), Bodies(plan.bodies)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sending = True
        self._fault: BaseException | None = None  # of our own making
        self.calls: list[TimedCall] = []
        self.unfinished = 0
        self.hopeless = False
        self.lag_s = array("d")

    async def run(self, stop: asyncio.Event) -> None:
        watch = asyncio.create_task(self._watch_lag())
        stopping = asyncio.create_task(stop.wait())
        over = asyncio.create_task(self._over.wait())
        self._pump()
        try:
            await asyncio.wait({stopping, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sending = False
            self.unfinished = self._tally.in_flight
            helpers = (watch, stopping, over)
            for task in (*self._tasks, *helpers):
                task.cancel()
            await asyncio.gather(*self._tasks, *helpers, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    # -- inside

    def _pump(self) -> None:
        """Sends what is due, and comes back when the next is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end_s = self._plan.end_s
        while self._sending:
            due_s = self._source.next_arrival_s()
            if due_s is None or (end_s is not None and due_s >= end_s):
                break
            wait_s = due_s - self._clock()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._pump)
                return
            taken, request = self._source.take()
            task = asyncio.create_task(self._call(self._plan.index(taken), request))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            self._tally.sent += 1
            self._tally.in_flight += 1
        if not self._tally.in_flight:
            self._over.set()

    async def _call(self, index: int, request: TraceRequest) -> None:
        prepared = self._bodies.prepare(index, request)
        call, tally = prepared.call, self._tally
        reader = AnswerReader(
            call, tally, streamed=self._plan.bodies.streamed, keep_text=prepared.keep_text
        )
        call.sent_s = self._clock()
        try:
            await self._client.call("POST", self._bodies.path, prepared.body, reader)
            tally.done += 1
        except CallError as error:
            call.error, call.end_s = error, self._clock()
            tally.failed += 1
            if not tally.done and tally.failed >= HOPELESS:
                self.hopeless, self._sending = True, False
        tally.in_flight -= 1
        self.calls.append(call)
        self._bodies.answered(request, reader.text)
        self._source.ended(request, self._clock())
        self._pump()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self._over.set()

    async def _watch_lag(self) -> None:
        while True:
            due_s = self._clock() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.lag_s.append(self._clock() - due_s)
