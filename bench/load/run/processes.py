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
_COUNTS = len(fields(LiveTally))
Watch = Callable[[LiveTally, float], None]  # called with the tally and the seconds since the start


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
