"""Executes a run in this process, or in several client processes, and reports its progress."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, fields
from multiprocessing.context import SpawnContext
from typing import Any

from msgspec.structs import replace

from bench.load.client.call import LiveTally
from bench.load.run.drive import Part, PartPlan, drive
from cbatch.core.request.errors import FieldError

TALLY_EVERY_S = 0.25  # interval of progress reports, and of checks for a stop
Watch = Callable[[LiveTally, float], None]  # called with the tally and the seconds since the start


def split(plan: PartPlan, processes: int) -> list[PartPlan]:
    """Divide the clients and requests of a plan among processes, without splitting sessions. Raises
    `FieldError` if a process would have no client or no request."""
    if processes == 1:
        return [plan]
    if plan.concurrency is not None and plan.concurrency < processes:
        raise FieldError(
            "--processes", f"{processes} share {plan.concurrency} clients", "use fewer processes"
        )
    # Each session, and each request without a session, has a process, in rotation.
    groups: dict[str | int, int] = {}
    named = ((r.session or i) for i, r in enumerate(plan.requests))
    owners = [groups.setdefault(name, len(groups)) % processes for name in named]
    if set(owners) != set(range(processes)):
        raise FieldError("--processes", "some have no request", "use fewer, or more requests")

    def part(process: int) -> PartPlan:
        own = [i for i, owner in enumerate(owners) if owner == process]
        clients = plan.concurrency
        return replace(
            plan,
            requests=tuple(plan.requests[i] for i in own),
            indices=tuple(plan.indices[i] for i in own),
            concurrency=clients and (clients + processes - 1 - process) // processes,
        )

    return [part(process) for process in range(processes)]


async def run_parts(
    plans: Sequence[PartPlan], *, stop: asyncio.Event, watch: Watch | None = None
) -> list[Part]:
    """Run a process per plan, or this process for a single plan. Returns the parts in order of the
    plans. Setting `stop` ends all parts early, with the calls so far."""
    loop = asyncio.get_running_loop()
    if len(plans) == 1:
        tally = LiveTally()
        watching = loop.create_task(_watch(lambda: [tally], watch))
        try:
            return [await drive(plans[0], start_s=time.monotonic(), stop=stop, tally=tally)]
        finally:
            watching.cancel()
    context = multiprocessing.get_context("spawn")
    shared = _Shared(context, len(plans))
    with ProcessPoolExecutor(len(plans), context, _set_shared, (shared,)) as pool:
        parts = [loop.run_in_executor(pool, _run_part, i, plan) for i, plan in enumerate(plans)]
        helpers = [loop.create_task(_watch(shared.read, watch)), loop.create_task(stop.wait())]
        helpers[1].add_done_callback(lambda _: shared.stop.set())
        try:
            return await asyncio.gather(*parts)
        finally:
            for helper in helpers:
                helper.cancel()  # also sets `shared.stop`


async def _watch(tallies: Callable[[], list[LiveTally]], watch: Watch | None) -> None:
    start_s = time.monotonic()
    while watch is not None:
        total = LiveTally(*map(sum, zip(*map(astuple, tallies()), strict=True)))
        start_s = start_s if total.sent else time.monotonic()  # processes take time to start
        watch(total, time.monotonic() - start_s)
        await asyncio.sleep(TALLY_EVERY_S)


class _Shared:
    """State that client processes share: the start, the request to stop, and a tally each."""

    def __init__(self, context: SpawnContext, processes: int) -> None:
        self._ready, self._start_s = context.Barrier(processes), context.Value("d", 0.0)
        self.stop = context.Event()
        self._counts = context.Array("q", processes * len(fields(LiveTally)), lock=False)

    def wait_for_start(self) -> float:
        """Wait until all processes are ready. Return the start on the monotonic clock."""
        if self._ready.wait() == 0:
            self._start_s.value = time.monotonic()
        self._ready.wait()
        return float(self._start_s.value)

    def read(self) -> list[LiveTally]:
        size = len(fields(LiveTally))
        counts = list(self._counts)
        return [LiveTally(*counts[i : i + size]) for i in range(0, len(counts), size)]

    def write(self, process: int, tally: LiveTally) -> None:
        size = len(fields(LiveTally))
        self._counts[process * size : (process + 1) * size] = astuple(tally)


_shared: _Shared  # of this client process


def _set_shared(shared: _Shared) -> None:
    """Initialise a client process."""
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
            _shared.write(process, tally)
            if _shared.stop.is_set():
                stop.set()
            await asyncio.sleep(TALLY_EVERY_S)

    start_s = _shared.wait_for_start()
    sharing = asyncio.create_task(share())
    try:
        return await drive(plan, start_s=start_s, stop=stop, tally=tally)
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
