"""Runs of a load: warm-up, repeats, and the server's counters before and after each run."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
from msgspec.structs import replace

from bench.load.client.bodies import BodySettings
from bench.load.client.call import CallError, LiveTally
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.drive import PartPlan, ramped
from bench.load.run.measure import LoadRun
from bench.load.run.options import LoadOptions, OfferedLoad
from bench.load.run.processes import run_parts, split
from bench.load.run.scrape import Watcher
from cbatch.core.request.errors import FieldError
from sim.workload.tokens import mix
from sim.workload.traces.request import TraceRequest

# Index of the first warm-up request. Prompts depend on the index, so no prompt of a run is cached.
WARMUP_INDEX = 10**9
WARMUP_CLIENTS = 8  # maximum number of clients in a warm-up


class MakeRequests(Protocol):
    def __call__(self, load: OfferedLoad, seed: int) -> list[TraceRequest]: ...


class ProgressView(Protocol):
    """Display of the progress of runs."""

    def announce(self, load: str, phase: str) -> None: ...

    def update(self, tally: LiveTally, now_s: float) -> None: ...


class Runner:
    """Runs loads. Setting `stop` ends a run early, with the calls so far."""

    def __init__(
        self,
        options: LoadOptions,
        endpoint: Endpoint,
        bodies: BodySettings,
        make_requests: MakeRequests,
        *,
        stop: asyncio.Event,
        view: ProgressView,
    ) -> None:
        self._options, self._endpoint, self._bodies = options, endpoint, bodies
        self._make_requests, self._stop, self._view = make_requests, stop, view

    async def runs(self, load: OfferedLoad, number: int = 0) -> list[LoadRun]:
        """Run the repeats of a load. Each repeat has a seed, and so prompts and times, of its own.
        `number` is the load's index in a sweep. Returns fewer runs if stopped."""
        options = self._options
        runs: list[LoadRun] = []
        for repeat in range(options.repeats):
            plan = self._plan(load, mix(options.seed, number * 1000 + repeat))
            if options.warmup and not repeat:
                self._view.announce(load.name, "warming up")
                await run_parts([self._warm(plan)], stop=self._stop)
            if self._stop.is_set():
                break
            several = f"{repeat + 1} of {options.repeats}"
            self._view.announce(load.name, several if options.repeats > 1 else "running")
            runs.append(await self._run(plan))
        return runs

    async def _run(self, plan: PartPlan) -> LoadRun:
        client = HttpClient(plan.endpoint, key=plan.key, timeout_s=10.0)
        try:
            async with Watcher(client) as watcher:
                parts = split(plan, self._options.processes)
                parts_run = await run_parts(parts, stop=self._stop, watch=self._view.update)
        finally:
            client.close()
        return LoadRun(
            parts_run,
            server=watcher.growth(),
            server_samples=watcher.samples(parts_run[0].start_s),
            interrupted=self._stop.is_set(),
            open_loop=plan.concurrency is None,
            ramp_s=self._options.ramp or 0.0,
        )

    def _plan(self, load: OfferedLoad, seed: int) -> PartPlan:
        options = self._options
        requests = self._make_requests(load, seed)
        is_open = load.concurrency is None
        if is_open and options.ramp:
            requests = list(ramped(requests, options.ramp))
        if not requests:
            raise FieldError("--requests", "there is nothing to send", "ask for more")
        has_turns = any(request.think_s is not None for request in requests)
        return PartPlan(
            endpoint=self._endpoint,
            bodies=replace(self._bodies, seed=seed, conversations=has_turns),
            requests=tuple(requests),
            indices=tuple(range(len(requests))),
            total=len(requests),
            concurrency=load.concurrency,
            think_s=options.think or 0.0,
            ramp_s=0.0 if is_open else options.ramp or 0.0,
            end_s=options.duration,
            cycle=options.requests is None and options.duration is not None,
            timeout_s=options.timeout,
            key=options.api_key,
        )

    def _warm(self, plan: PartPlan) -> PartPlan:
        """Return a plan by which a few clients send `warmup` of the plan's requests."""
        count = self._options.warmup
        requests = [plan.requests[i % len(plan.requests)] for i in range(count)]
        requests = [replace(r, session=None, think_s=None, hash_ids=None) for r in requests]
        return replace(
            plan,
            requests=tuple(requests),
            indices=tuple(range(WARMUP_INDEX, WARMUP_INDEX + count)),
            total=count,
            concurrency=min(WARMUP_CLIENTS, count, plan.concurrency or WARMUP_CLIENTS),
            think_s=0.0,
            ramp_s=0.0,
            end_s=None,
            cycle=False,
        )


async def find_model(client: HttpClient) -> str:
    """Return the first model that the server lists. Raises `FieldError`."""
    try:
        status, raw = await client.request("GET", "/v1/models")
    except CallError as error:
        raise FieldError("URL", str(error), "start the server first, or fix the URL") from error
    try:
        name: str = msgspec.json.decode(raw)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        problem = f"/v1/models returned {status} and lists no model"
        raise FieldError("--model", problem, "name it, or give --api-key") from error
    return name
