"""Runs of a load: warm-up, repeats, and the server's counters before and after each run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from bench.load.client.bodies import BodySettings
from bench.load.client.call import CallError
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.drive import PartPlan
from bench.load.run.measure import LoadRun
from bench.load.run.processes import Watch, run_parts, split
from bench.load.run.scrape import Watcher, difference, samples, scrape
from bench.load.run.sources import ramped
from cbatch.core.request.errors import FieldError
from sim.workload.tokens import mix
from sim.workload.traces.request import TraceRequest

# Index of the first warm-up request. Prompts depend on the index, so no prompt of a run is cached.
WARMUP_INDEX = 10**9
WARMUP_CLIENTS = 8  # maximum number of clients in a warm-up


class OfferedLoad(msgspec.Struct, frozen=True):
    """Number of clients, or requests a second. Neither is set for a trace with its own times."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def value(self) -> float:
        return self.rate_per_s or self.concurrency or 0

    def doubled(self) -> OfferedLoad:
        if self.rate_per_s is not None:
            return OfferedLoad(rate_per_s=2 * self.rate_per_s)
        return OfferedLoad(concurrency=2 * (self.concurrency or 1))

    def as_settings(self) -> dict[str, float | None]:
        return {"concurrency": self.concurrency, "rate_per_s": self.rate_per_s}


class MakeRequests(Protocol):
    def __call__(self, load: OfferedLoad, seed: int) -> list[TraceRequest]: ...


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all loads of a command."""

    endpoint: Endpoint
    bodies: BodySettings
    key: str | None = None
    timeout_s: float = 600.0
    processes: int = 1
    duration_s: float | None = None
    cycle: bool = False  # a closed loop repeats its requests until `duration_s`
    think_s: float = 0.0
    ramp_s: float = 0.0
    warmup: int = 0
    repeats: int = 1
    seed: int = 0


class Runner:
    """Runs loads. `watch` gets the progress of a run, `announce` the name of each phase."""

    def __init__(
        self,
        settings: LoadSettings,
        make_requests: MakeRequests,
        *,
        stop: asyncio.Event,
        watch: Watch | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._settings, self._make_requests = settings, make_requests
        self._stop, self._watch, self._announce = stop, watch, announce

    async def runs(self, load: OfferedLoad, number: int = 0) -> list[LoadRun]:
        """Run the repeats of a load. Each repeat has a seed, and so prompts and times, of its own.
        `number` is the load's index in a sweep. Returns fewer runs if stopped."""
        settings = self._settings
        runs: list[LoadRun] = []
        for repeat in range(settings.repeats):
            seed = mix(settings.seed, number * 1000 + repeat)
            plan = self._plan(load, seed)
            if settings.warmup and not repeat:
                self._begin("warming up")
                await run_parts([self._warm(plan)], stop=self._stop)
            if self._stop.is_set():
                break
            self._begin(
                f"{repeat + 1} of {settings.repeats}" if settings.repeats > 1 else "running"
            )
            runs.append(await self._run(plan))
        return runs

    async def _run(self, plan: PartPlan) -> LoadRun:
        settings = self._settings
        client = HttpClient(settings.endpoint, key=settings.key, timeout_s=10.0)
        try:
            before = await scrape(client)
            async with Watcher(client) as watcher:
                parts = await run_parts(
                    split(plan, settings.processes), stop=self._stop, watch=self._watch
                )
            after = await scrape(client)
        finally:
            client.close()
        return LoadRun(
            parts,
            server=difference(before, after),
            server_samples=samples(watcher.scrapes, parts[0].start_s),
            interrupted=self._stop.is_set(),
            open_loop=plan.concurrency is None,
            ramp_s=settings.ramp_s,
        )

    def _plan(self, load: OfferedLoad, seed: int) -> PartPlan:
        settings = self._settings
        requests = self._make_requests(load, seed)
        is_open = load.concurrency is None
        if is_open and settings.ramp_s:
            requests = list(ramped(requests, settings.ramp_s))
        if not requests:
            raise FieldError("--requests", "there is nothing to send", "ask for more")
        has_turns = any(request.think_s is not None for request in requests)
        return PartPlan(
            endpoint=settings.endpoint,
            bodies=replace(settings.bodies, seed=seed, conversations=has_turns),
            requests=tuple(requests),
            indices=tuple(range(len(requests))),
            total=len(requests),
            concurrency=load.concurrency,
            think_s=settings.think_s,
            ramp_s=0.0 if is_open else settings.ramp_s,
            end_s=settings.duration_s,
            cycle=settings.cycle and settings.duration_s is not None,
            timeout_s=settings.timeout_s,
            key=settings.key,
        )

    def _warm(self, plan: PartPlan) -> PartPlan:
        """Return a plan by which a few clients send `warmup` of the plan's requests."""
        count = self._settings.warmup
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

    def _begin(self, phase: str) -> None:
        if self._announce is not None:
            self._announce(phase)


async def find_model(client: HttpClient) -> str:
    """Return the first model that the server lists. Raises `FieldError`."""
    try:
        status, raw = await client.get("/v1/models")
    except CallError as error:
        raise FieldError("URL", str(error), "start the server first, or fix the URL") from error
    try:
        name: str = msgspec.json.decode(raw)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise FieldError(
            "--model", f"/v1/models returned {status} and lists no model", "name it"
        ) from error
    return name
