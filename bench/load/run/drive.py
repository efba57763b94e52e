"""Sends the requests of a source to a server in real time, from this process or from several.

Only the source decides when a request is due; a slow response delays the next request only in a
closed loop. Latencies count from the time at which a request was due.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, fields
from multiprocessing.context import SpawnContext
from typing import Any

import msgspec
from msgspec.structs import replace

from bench.load.client.answer import AnswerReader
from bench.load.client.bodies import Bodies, BodySettings
from bench.load.client.http import CallError, Endpoint, HttpClient, LiveTally
from cbatch.core.request.errors import FieldError
from sim.workload.sources import OpenLoop, Source
from sim.workload.traces.changes import endless
from sim.workload.traces.request import TraceRequest

MAX_FAILURES = 100  # number of failures, without a success, after which sending stops
TALLY_EVERY_S = 0.25  # interval of progress reports, and of checks for a stop
_COUNTS = len(fields(LiveTally))
Watch = Callable[[LiveTally, float], None]  # called with the tally and the seconds since the start


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
        assert self._next is not None
        turns = deque([self._next])
        session = self._next[1].session
        while (following := next(self._requests, None)) is not None:
            request = following[1]
            if session is None or request.session != session or request.think_s is None:
                break
            turns.append(following)
        self._next = following
        return turns


def ramped(requests: Iterable[TraceRequest], ramp_s: float) -> Iterator[TraceRequest]:
    """Delay arrivals so that their rate grows linearly from 0 over `ramp_s` and is unchanged after.

    At rate r there should be r t^2 / (2 ramp_s) arrivals by t < ramp_s. So an arrival at s moves
    to the t with t^2 / (2 ramp_s) = s. Arrivals from s = ramp_s / 2 on move to s + ramp_s / 2."""
    for request in requests:
        due_s = request.arrival_s
        late_s = due_s + ramp_s / 2 if due_s >= ramp_s / 2 else math.sqrt(2 * ramp_s * due_s)
        yield replace(request, arrival_s=late_s)


class PartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of one process. `indices[i]` is the index of `requests[i]` among the `total` requests of
    all processes."""

    endpoint: Endpoint
    bodies: BodySettings
    requests: tuple[TraceRequest, ...]
    indices: tuple[int, ...]
    total: int
    concurrency: int | None = None  # clients of a closed loop; None: an open loop
    think_s: float = 0.0
    ramp_s: float = 0.0  # the clients of a closed loop start over this time
    end_s: float | None = None  # no request is sent from this time on
    cycle: bool = False  # a closed loop repeats its requests when all are sent
    timeout_s: float = 600.0
    key: str | None = None

    def source(self) -> Source:
        if self.concurrency is None:
            return OpenLoop(self.requests)
        requests = list(self.requests)
        return ClosedSessions(
            endless(requests) if self.cycle else requests,
            self.concurrency,
            think_s=self.think_s,
            ramp_s=self.ramp_s,
        )

    def index(self, number: int) -> int:
        repeat, i = divmod(number, len(self.indices))
        return self.indices[i] + repeat * self.total


class Part(msgspec.Struct):
    """Result of one process. `start_s` is the start of the run on the monotonic clock."""

    calls: list[Any]  # `TimedCall`
    unfinished: int  # calls in flight when the run was stopped
    gave_up: bool  # stopped after `MAX_FAILURES` failures
    cpu_s: float
    elapsed_s: float
    start_s: float = 0.0


async def drive(
    plan: PartPlan, *, start_s: float, stop: asyncio.Event, tally: LiveTally | None = None
) -> Part:
    """Run a plan. `start_s` is the start of the run on the monotonic clock. Setting `stop` cancels
    the calls in flight."""
    driver, cpu_s = _Driver(plan, start_s, tally or LiveTally()), time.process_time()
    await driver.run(stop)
    driver.part.cpu_s, driver.part.elapsed_s = time.process_time() - cpu_s, driver.clock()
    return driver.part


class _Driver:
    def __init__(self, plan: PartPlan, start_s: float, tally: LiveTally) -> None:
        self.clock: Callable[[], float] = lambda: time.monotonic() - start_s
        self.part = Part([], 0, False, 0.0, 0.0, start_s)
        self._plan, self._tally = plan, tally
        self._client = HttpClient(
            plan.endpoint, key=plan.key, timeout_s=plan.timeout_s, clock=self.clock
        )
        self._source, self._bodies = plan.source(), Bodies(plan.bodies)
        self._tasks: set[asyncio.Task[None]] = set()
        # Has the exception of a call if that is no `CallError`.
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._sending = True

    async def run(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopping, self._finished}
        self._send_due()
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sending, self.part.unfinished = False, self._tally.in_flight
            for task in (*self._tasks, stopping):
                task.cancel()
            await asyncio.gather(*self._tasks, stopping, return_exceptions=True)
            self._client.close()
        if self._finished.done():
            self._finished.result()

    # -- inside

    def _send_due(self) -> None:
        """Send the requests that are due, and schedule itself for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end_s = self._plan.end_s
        while self._sending:
            due_s = self._source.next_arrival_s()
            if due_s is None or (end_s is not None and due_s >= end_s):
                break
            wait_s = due_s - self.clock()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._send_due)
                return
            number, request = self._source.take()
            task = asyncio.create_task(self._call(self._plan.index(number), request))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            self._tally.sent += 1
            self._tally.in_flight += 1
        if not (self._tally.in_flight or self._finished.done()):
            self._finished.set_result(None)

    async def _call(self, index: int, request: TraceRequest) -> None:
        prepared = self._bodies.prepare(index, request)
        call, tally = prepared.call, self._tally
        reader = AnswerReader(
            call, tally, streamed=self._plan.bodies.streamed, keep_text=prepared.keep_text
        )
        call.sent_s = self.clock()
        try:
            await self._client.call("POST", self._bodies.path, prepared.body, reader)
            tally.done += 1
        except CallError as error:
            call.error, call.end_s = error, self.clock()
            tally.failed += 1
            if not tally.done and tally.failed >= MAX_FAILURES:
                self.part.gave_up, self._sending = True, False
        tally.in_flight -= 1
        self.part.calls.append(call)
        self._bodies.add_answer(request, reader.text)
        self._source.ended(request, self.clock())
        self._send_due()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._finished.done():
            self._finished.set_exception(error)


def split(plan: PartPlan, processes: int) -> list[PartPlan]:
    """Divide the clients and requests of a plan among processes, without splitting sessions. Raises
    `FieldError` if a process would have no client or no request."""
    clients = plan.concurrency
    if processes == 1:
        return [plan]
    if clients is not None and clients < processes:
        problem = f"{processes} share {clients} clients"
        raise FieldError("--processes", problem, "use fewer processes")
    # Each session, and each request without a session, has a process, in rotation.
    groups: dict[str | int, int] = {}
    named = ((r.session or i) for i, r in enumerate(plan.requests))
    owners = [groups.setdefault(name, len(groups)) % processes for name in named]
    if set(owners) != set(range(processes)):
        raise FieldError("--processes", "some have no request", "use fewer, or more requests")
    parts = []
    for process in range(processes):
        own = [i for i, owner in enumerate(owners) if owner == process]
        parts.append(
            replace(
                plan,
                requests=tuple(plan.requests[i] for i in own),
                indices=tuple(plan.indices[i] for i in own),
                concurrency=clients and (clients + processes - 1 - process) // processes,
            )
        )
    return parts


async def run_parts(
    plans: Sequence[PartPlan], *, stop: asyncio.Event, watch: Watch | None = None
) -> list[Part]:
    """Run a process per plan, or this process for a single plan. Returns the parts in order of the
    plans. Setting `stop` ends all parts early, with the calls so far."""
    loop = asyncio.get_running_loop()
    if len(plans) == 1:
        tally = LiveTally()
        watching = loop.create_task(_watch(lambda: tally, watch))
        try:
            return [await drive(plans[0], start_s=time.monotonic(), stop=stop, tally=tally)]
        finally:
            watching.cancel()
    context = multiprocessing.get_context("spawn")
    shared = _Shared(context, len(plans))
    with ProcessPoolExecutor(len(plans), context, _set_shared, (shared,)) as pool:
        parts = [loop.run_in_executor(pool, _run_part, i, plan) for i, plan in enumerate(plans)]
        helpers = [loop.create_task(_watch(shared.total, watch)), loop.create_task(stop.wait())]
        helpers[1].add_done_callback(lambda _: shared.stop.set())
        try:
            return await asyncio.gather(*parts)
        finally:
            for helper in helpers:
                helper.cancel()  # also sets `shared.stop`


async def _watch(total: Callable[[], LiveTally], watch: Watch | None) -> None:
    start_s = time.monotonic()
    while watch is not None:
        tally = total()
        start_s = start_s if tally.sent else time.monotonic()  # processes take time to start
        watch(tally, time.monotonic() - start_s)
        await asyncio.sleep(TALLY_EVERY_S)


class _Shared:
    """State that client processes share: the start, the request to stop, and a tally each."""

    def __init__(self, context: SpawnContext, processes: int) -> None:
        self.ready, self.start_s = context.Barrier(processes), context.Value("d", 0.0)
        self.stop = context.Event()
        self.counts = context.Array("q", processes * _COUNTS, lock=False)

    def total(self) -> LiveTally:
        return LiveTally(*(sum(self.counts[at::_COUNTS]) for at in range(_COUNTS)))


_shared: _Shared  # of this client process


def _set_shared(shared: _Shared) -> None:
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal too


def _run_part(process: int, plan: PartPlan) -> Part:
    part: Part = event_loop_runner()(_drive_shared(process, plan))
    return part


async def _drive_shared(process: int, plan: PartPlan) -> Part:
    stop, tally = asyncio.Event(), LiveTally()

    async def share() -> None:
        while True:
            _shared.counts[process * _COUNTS : (process + 1) * _COUNTS] = astuple(tally)
            if _shared.stop.is_set():
                stop.set()
            await asyncio.sleep(TALLY_EVERY_S)

    if _shared.ready.wait() == 0:  # all processes are ready
        _shared.start_s.value = time.monotonic()
    _shared.ready.wait()
    sharing = asyncio.create_task(share())
    try:
        return await drive(plan, start_s=float(_shared.start_s.value), stop=stop, tally=tally)
    finally:
        sharing.cancel()


def event_loop_runner() -> Callable[..., Any]:
    """Return `uvloop.run`, or `asyncio.run` if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    run: Callable[..., Any] = uvloop.run
    return run
