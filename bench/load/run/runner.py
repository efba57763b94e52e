"""Runs of a load: warm-up, repeats, what the server counted before and after."""

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
from sim.traces.request import TraceRequest
from sim.workload.tokens import mix

WARM_INDEX = 10**9  # of the first request of a warm-up: its words are not those of the run
WARM_CLIENTS = 8


class OfferedLoad(msgspec.Struct, frozen=True):
    """Clients, or requests a second; neither: the times of a trace."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def value(self) -> float:
        return self.rate_per_s or self.concurrency or 0

    def doubled(self) -> OfferedLoad:
        if self.rate_per_s is not None:
            return OfferedLoad(rate_per_s=2 * self.rate_per_s)
        return OfferedLoad(concurrency=2 * (self.concurrency or 1))

    def words(self) -> dict[str, float | None]:
        return {"concurrency": self.concurrency, "rate_per_s": self.rate_per_s}


class MakeRequests(Protocol):
    def __call__(self, load: OfferedLoad, seed: int) -> list[TraceRequest]: ...


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint
    bodies: BodySettings
    key: str | None = None
    timeout_s: float = 600.0
    processes: int = 1
    duration_s: float | None = None
    again: bool = False  # a closed loop goes through its requests again and again until then
    think_s: float = 0.0
    ramp_s: float = 0.0
    warmup: int = 0
    repeats: int = 1
    seed: int = 0


class Runner:
    """`watch` is told how far a run is, `announce` which one begins."""

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
        """The repeats, each with words and times of its own; `number` is that of the load in a
        sweep. Fewer if it was stopped."""
        settings = self._settings
        found: list[LoadRun] = []
        for repeat in range(settings.repeats):
            seed = mix(settings.seed, number * 1000 + repeat)
            plan = self._plan(load, seed)
            if settings.warmup and not repeat:
                self._tell("warming up")
                await run_parts([self._warm(plan)], stop=self._stop)
            if self._stop.is_set():
                break
            self._tell(f"{repeat + 1} of {settings.repeats}" if settings.repeats > 1 else "running")
            found.append(await self._run(plan))
        return found

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
            server_samples=samples(watcher.looks, parts[0].start_s),
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
        talks = any(request.think_s is not None for request in requests)
        return PartPlan(
            endpoint=settings.endpoint,
            bodies=replace(settings.bodies, seed=seed, conversations=talks),
            requests=tuple(requests),
            indices=tuple(range(len(requests))),
            total=len(requests),
            concurrency=load.concurrency,
            think_s=settings.think_s,
            ramp_s=0.0 if is_open else settings.ramp_s,
            end_s=settings.duration_s,
            again=settings.again and settings.duration_s is not None,
            timeout_s=settings.timeout_s,
            key=settings.key,
        )

    def _warm(self, plan: PartPlan) -> PartPlan:
        """Some requests of the kind, sent by a few clients; what they take is not counted."""
        count = self._settings.warmup
        some = [plan.requests[i % len(plan.requests)] for i in range(count)]
        some = [replace(request, session=None, think_s=None, hash_ids=None) for request in some]
        return replace(
            plan,
            requests=tuple(some),
            indices=tuple(range(WARM_INDEX, WARM_INDEX + count)),
            total=count,
            concurrency=min(WARM_CLIENTS, count, plan.concurrency or WARM_CLIENTS),
            think_s=0.0,
            ramp_s=0.0,
            end_s=None,
            again=False,
        )

    def _tell(self, what: str) -> None:
        if self._announce is not None:
            self._announce(what)


async def find_model(client: HttpClient) -> str:
    """The first that the server names. Raises `FieldError`."""
    try:
        status, raw = await client.get("/v1/models")
    except CallError as error:
        raise FieldError("URL", str(error), "start the server first, or mend the URL") from error
    try:
        name: str = msgspec.json.decode(raw)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise FieldError(
            "--model", f"/v1/models is answered with {status} and names none", "name it"
        ) from error
    return name
