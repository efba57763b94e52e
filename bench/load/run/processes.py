"""Executes a run in this process, or in several client processes, and reports its progress."""

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

TALLY_EVERY_S = 0.25  # interval of progress reports
START_DELAY_S = 0.05  # time for all processes to learn when the run starts
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
    owners = _owners(plan, processes)
    if set(owners) != set(range(processes)):
        raise FieldError("--processes", "some have no request", "use fewer, or more requests")
    parts: list[PartPlan] = []
    for process in range(processes):
        own = [i for i, owner in enumerate(owners) if owner == process]
        concurrency = None
        if plan.concurrency is not None:
            concurrency = (plan.concurrency + processes - 1 - process) // processes
        parts.append(
            replace(
                plan,
                requests=tuple(plan.requests[i] for i in own),
                indices=tuple(plan.indices[i] for i in own),
                concurrency=concurrency,
            )
        )
    return parts


def _owners(plan: PartPlan, processes: int) -> list[int]:
    """Assign a process to each session, and to each request without a session, in rotation."""
    groups: dict[str, int] = {}
    owners: list[int] = []
    count = 0
    for request in plan.requests:
        group = None if request.session is None else groups.get(request.session)
        if group is None:
            group, count = count, count + 1
            if request.session is not None:
                groups[request.session] = group
        owners.append(group % processes)
    return owners


async def run_parts(
    plans: Sequence[PartPlan], *, stop: asyncio.Event, watch: Watch | None = None
) -> list[Part]:
    """Run a process per plan, or this process for a single plan. Returns the parts in order of the
    plans. Setting `stop` ends all parts early, with the calls so far."""
    if len(plans) == 1:
        return [await _run_here(plans[0], stop, watch)]
    children = [_Child(plan) for plan in plans]
    try:
        await asyncio.gather(*(child.ready() for child in children))
        start_s = time.monotonic() + START_DELAY_S
        for child in children:
            child.send(start_s)
        watching = asyncio.create_task(_watch(lambda: [c.tally for c in children], start_s, watch))
        stopping = asyncio.create_task(_forward_stop(stop, children))
        try:
            return list(await asyncio.gather(*(child.part() for child in children)))
        finally:
            watching.cancel()
            stopping.cancel()
    finally:
        for child in children:
            child.end()


async def _run_here(plan: PartPlan, stop: asyncio.Event, watch: Watch | None) -> Part:
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
        await asyncio.sleep(TALLY_EVERY_S)


async def _forward_stop(stop: asyncio.Event, children: Sequence[_Child]) -> None:
    await stop.wait()
    for child in children:
        child.send(None)


class _Child:
    """A process that runs one plan. The parent sends the start time, and None to stop early. The
    child sends None when it is ready, then tallies, and at last its `Part`."""

    def __init__(self, plan: PartPlan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_child, args=(child_pipe, plan), daemon=True)
        self._process.start()
        child_pipe.close()
        self.tally = LiveTally()

    async def ready(self) -> None:
        await self._receive()

    async def part(self) -> Part:
        while True:
            message = await self._receive()
            if isinstance(message, Part):
                return message
            self.tally = message

    def send(self, message: float | None) -> None:
        with suppress(OSError):
            self._pipe.send(message)

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal too, and sends None
    event_loop_runner()(_serve(pipe, plan))


async def _serve(pipe: Connection, plan: PartPlan) -> None:
    loop, stop, tally = asyncio.get_running_loop(), asyncio.Event(), LiveTally()
    pipe.send_bytes(pickle.dumps(None))
    start_s: float = await loop.run_in_executor(None, pipe.recv)

    def wait_for_stop() -> None:
        with suppress(EOFError, OSError):  # the parent has exited
            pipe.recv()
        with suppress(RuntimeError):  # the loop is closed: the part is done
            loop.call_soon_threadsafe(stop.set)

    # In a thread: the event loop would make the pipe non-blocking, and then cut messages short.
    threading.Thread(target=wait_for_stop, daemon=True).start()

    async def send_tallies() -> None:
        while True:
            await asyncio.sleep(TALLY_EVERY_S)
            pipe.send_bytes(pickle.dumps(tally))

    sending = asyncio.create_task(send_tallies())
    part = await drive(plan, start_s=start_s, stop=stop, tally=tally)
    sending.cancel()
    pipe.send_bytes(pickle.dumps(part))


def event_loop_runner() -> Callable[..., Any]:
    """Return `uvloop.run`, or `asyncio.run` if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    run: Callable[..., Any] = uvloop.run
    return run
