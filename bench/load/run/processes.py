"""One run by one process or by several, and what it looks like meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from multiprocessing.connection import Connection
from typing import Any

from msgspec.structs import replace

from bench.load.client.call import LiveTally
from bench.load.run.drive import Part, PartPlan, drive
from cbatch.core.request.errors import FieldError

TOLD_EVERY_S = 0.25
HEADSTART_S = 0.05  # between saying when a run begins and its beginning
Watch = Callable[[LiveTally, float], None]  # given what is known, and the seconds since the start


def split(plan: PartPlan, processes: int) -> list[PartPlan]:
    """Its clients and requests, shared out; sessions stay whole. Raises `FieldError`."""
    if processes == 1:
        return [plan]
    if plan.concurrency is not None and plan.concurrency < processes:
        raise FieldError(
            "--processes", f"{processes} share {plan.concurrency} clients", "use fewer processes"
        )
    owners = _owners(plan, processes)
    if set(owners) != set(range(processes)):
        raise FieldError("--processes", "some have no request", "use fewer, or more requests")
    parts: list[PartPlan] = []
    for process in range(processes):
        mine = [at for at, owner in enumerate(owners) if owner == process]
        share = None
        if plan.concurrency is not None:
            share = (plan.concurrency + processes - 1 - process) // processes
        parts.append(
            replace(
                plan,
                requests=tuple(plan.requests[at] for at in mine),
                indices=tuple(plan.indices[at] for at in mine),
                concurrency=share,
            )
        )
    return parts


def _owners(plan: PartPlan, processes: int) -> list[int]:
    groups: dict[str, int] = {}
    owners: list[int] = []
    count = 0
    for request in plan.requests:
        known = None if request.session is None else groups.get(request.session)
        if known is None:
            known, count = count, count + 1
            if request.session is not None:
                groups[request.session] = known
        owners.append(known % processes)
    return owners


async def run_parts(
    plans: Sequence[PartPlan], *, stop: asyncio.Event, watch: Watch | None = None
) -> list[Part]:
    """The parts in the order of the plans. Setting `stop` ends them with what they have."""
    if len(plans) == 1:
        return [await _here(plans[0], stop, watch)]
    children = [_Child(plan) for plan in plans]
    try:
        await asyncio.gather(*(child.ready() for child in children))
        start_s = time.monotonic() + HEADSTART_S
        for child in children:
            child.tell(start_s)
        watching = asyncio.create_task(_watch(lambda: [c.tally for c in children], start_s, watch))
        stopping = asyncio.create_task(_tell_stop(stop, children))
        try:
            return list(await asyncio.gather(*(child.part() for child in children)))
        finally:
            watching.cancel()
            stopping.cancel()
    finally:
        for child in children:
            child.end()


async def _here(plan: PartPlan, stop: asyncio.Event, watch: Watch | None) -> Part:
    tally, start_s = LiveTally(), time.monotonic()
    watching = asyncio.create_task(_watch(lambda: [tally], start_s, watch))
    try:
        return await drive(plan, start_s=start_s, stop=stop, tally=tally)
    finally:
        watching.cancel()


async def _watch(
    tallies: Callable[[], list[LiveTally]], start_s: float, watch: Watch | None
) -> None:
    while watch is not None:
        total = LiveTally(*map(sum, zip(*map(astuple, tallies()), strict=True)))
        watch(total, time.monotonic() - start_s)
        await asyncio.sleep(TOLD_EVERY_S)


async def _tell_stop(stop: asyncio.Event, children: Sequence[_Child]) -> None:
    await stop.wait()
    for child in children:
        child.tell(None)


class _Child:
    """A process that runs one plan. It is told when to start, and perhaps to stop; it tells that it
    is ready, tallies, and its part."""

    def __init__(self, plan: PartPlan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, plan), daemon=True)
        self._process.start()
        theirs.close()
        self.tally = LiveTally()

    async def ready(self) -> None:
        await self._receive()

    async def part(self) -> Part:
        while True:
            told = await self._receive()
            if isinstance(told, Part):
                return told
            self.tally = told

    def tell(self, what: float | None) -> None:
        with suppress(OSError):
            self._pipe.send(what)

    def end(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    async def _receive(self) -> Any:
        try:
            raw = await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv_bytes)
        except (EOFError, OSError) as error:
            raise RuntimeError("a process of the load tester died") from error
        return pickle.loads(raw)


def _child(pipe: Connection, plan: PartPlan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and tells
    loop_of()(_serve(pipe, plan))


async def _serve(pipe: Connection, plan: PartPlan) -> None:
    loop, stop, tally = asyncio.get_running_loop(), asyncio.Event(), LiveTally()
    pipe.send_bytes(pickle.dumps(None))
    start_s: float = await loop.run_in_executor(None, pipe.recv)

    def wait_for_stop() -> None:
        with suppress(EOFError, OSError):  # the parent is gone
            pipe.recv()
        with suppress(RuntimeError):  # so is the loop: the part is done
            loop.call_soon_threadsafe(stop.set)

    # Not by the loop: it would make the pipe one that does not block, and cut what is sent by it.
    threading.Thread(target=wait_for_stop, daemon=True).start()

    async def tell() -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            pipe.send_bytes(pickle.dumps(tally))

    telling = asyncio.create_task(tell())
    part = await drive(plan, start_s=start_s, stop=stop, tally=tally)
    telling.cancel()
    pipe.send_bytes(pickle.dumps(part))


def loop_of() -> Callable[..., Any]:
    """What runs a coroutine: uvloop, where the system has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    run: Callable[..., Any] = uvloop.run
    return run
