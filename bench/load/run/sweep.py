"""Runs of a load, with warm-up and repeats, and several loads one after another: a sweep with its
knee, or a search for the highest rate that meets the objectives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from bench.load.client.bodies import BodySettings
from bench.load.client.http import CallError, Endpoint, HttpClient
from bench.load.run.drive import PartPlan, ramped, run_parts, split
from bench.load.run.measure import LoadRun
from bench.load.run.options import LoadOptions, OfferedLoad
from bench.load.run.report import Knee, Measured, Sweep, difference, samples_of, scrape, watching
from cbatch.core.request.errors import FieldError
from sim.report.capacity import Capacity, Trial, rounds_needed, search_rates
from sim.workload.tokens import mix
from sim.workload.traces.request import TraceRequest

# Index of the first warm-up request. Prompts depend on the index, so no prompt of a run is cached.
WARMUP_INDEX = 10**9
WARMUP_CLIENTS = 8  # maximum number of clients in a warm-up
MAX_POINTS = 16  # loads of a sweep that doubles.
GAIN = 1.05  # smallest ratio to the best throughput so far that counts as growth.
MIN_POINTS = 3  # minimum of loads for a knee.
TOLERANCE = 0.05  # relative width of the interval that ends a search; repeats differ by about 5 %.
SEARCH_RANGE = 64.0  # a search goes from 1/64 of the first rate to 64 times that rate


class Runner:
    """Runs loads. Setting `stop` ends a run early, with the calls so far."""

    def __init__(
        self,
        options: LoadOptions,
        endpoint: Endpoint,
        bodies: BodySettings,
        make_requests: Callable[[OfferedLoad, int], list[TraceRequest]],
        *,
        stop: asyncio.Event,
        view: Any,  # `announce` and `update` of a progress display
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
            async with watching(client) as scrapes:
                parts = split(plan, self._options.processes)
                parts_run = await run_parts(parts, stop=self._stop, watch=self._view.update)
            growth = difference(scrapes[0], await scrape(client)) if scrapes else None
        finally:
            client.close()
        return LoadRun(
            parts_run,
            server=growth,
            server_samples=samples_of(scrapes, parts_run[0].start_s),
            interrupted=self._stop.is_set(),
            open_loop=plan.concurrency is None,
            ramp_s=self._options.ramp or 0.0,
        )

    def _plan(self, load: OfferedLoad, seed: int) -> PartPlan:
        options, is_open = self._options, load.concurrency is None
        requests, ramp_s = self._make_requests(load, seed), options.ramp or 0.0
        if is_open and ramp_s:
            requests = list(ramped(requests, ramp_s))
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
            ramp_s=0.0 if is_open else ramp_s,
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
        return PartPlan(
            endpoint=plan.endpoint,
            bodies=plan.bodies,
            requests=tuple(requests),
            indices=tuple(range(WARMUP_INDEX, WARMUP_INDEX + count)),
            total=count,
            concurrency=min(WARMUP_CLIENTS, count, plan.concurrency or WARMUP_CLIENTS),
            timeout_s=plan.timeout_s,
            key=plan.key,
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


class Point(NamedTuple):
    load: OfferedLoad
    runs: list[LoadRun]
    report: Measured


Measure = Callable[[OfferedLoad, list[LoadRun]], Measured]


async def sweep(
    runner: Runner, loads: Sequence[OfferedLoad], measure: Measure, *, doubling: bool = False
) -> list[Point]:
    """Measure the loads in order. With `doubling`, continue with twice the load each time until the
    last two loads brought no gain. An interrupted load is reported too."""
    points: list[Point] = []
    remaining = list(loads)
    while remaining and await _measure_next(runner, remaining.pop(0), measure, points):
        if doubling and not remaining and len(points) < MAX_POINTS:
            remaining = [] if is_flat(throughputs(points)) else [points[-1].load.doubled()]
    return points


async def find_rate(
    runner: Runner, first_per_s: float, share: float, measure: Measure
) -> tuple[list[Point], Capacity | None]:
    """Search for the highest rate at which at least this `share` of the calls sent met all
    objectives and calls did not pile up. Returns the points by ascending rate, and the capacity, or
    None if the search was stopped."""
    lowest, highest = first_per_s / SEARCH_RANGE, first_per_s * SEARCH_RANGE
    search = search_rates(first_per_s, lowest=lowest, highest=highest, tolerance=TOLERANCE)
    points: list[Point] = []
    capacity: Capacity | None = None
    rate = next(search)
    while await _measure_next(runner, OfferedLoad(rate_per_s=rate), measure, points):
        try:
            rate = search.send(to_trial(rate, points[-1].report, share))
        except StopIteration as end:
            capacity = end.value
            break
    return sorted(points, key=lambda point: point.load.value), capacity


async def _measure_next(
    runner: Runner, load: OfferedLoad, measure: Measure, points: list[Point]
) -> bool:
    """Add the point of a load to `points`. Returns False if the run was interrupted; no point is
    added if it was stopped before a call ended."""
    runs = [run for run in await runner.runs(load, len(points)) if run.calls]
    if runs:
        points.append(Point(load, runs, measure(load, runs)))
    return bool(runs) and not points[-1].report.interrupted


def to_trial(rate_per_s: float, report: Measured, share: float) -> Trial:
    # Without a successful call there is no goodput.
    reached = 0.0 if report.goodput is None else report.goodput.share
    return Trial(
        rate=rate_per_s,
        meets=reached >= share and not report.saturated,
        arrivals_per_s=report.sent / report.duration_s if report.duration_s else 0.0,
        output_tokens_per_s=report.output_tokens_per_s,
        ttft_s=None,
        tpot_s=None,
        e2e_s=None,
        goodput_share=reached,
        rounds_needed=(needed := rounds_needed(report.duration_s or 1.0, report.e2e_s.mean or 0.0)),
        too_short=needed > 1,
    )


def throughputs(points: Sequence[Point]) -> list[float]:
    """Return each point's output tokens a second: in steady windows if all points have a window,
    otherwise over whole runs, with ramp and drain."""
    reports = [point.report for point in points]
    steady = [report.steady.output_tokens_per_s for report in reports if report.steady is not None]
    return steady if len(steady) == len(reports) else [r.output_tokens_per_s or 0 for r in reports]


def find_knee(loads: Sequence[float], throughputs: Sequence[float]) -> Knee | None:
    """Fit min(slope x load, plateau), the two asymptotes of a closed system (Denning and Buzen
    1978, section 4), to ascending loads; the knee is where they meet. The fit minimises the squares
    of relative errors over all divisions of the points into a rising and a flat part. None with
    fewer than three loads, or if a throughput is 0."""
    x, y = np.asarray(loads, dtype=np.float64), np.asarray(throughputs, dtype=np.float64)
    if len(x) < MIN_POINTS or (y <= 0).any() or (x <= 0).any():
        return None
    fits: list[tuple[float, float, float]] = []
    for rising in range(1, len(x) + 1):
        # sum (a u - 1)^2, with u = f / y for the function a f, is least at a = sum(u) / sum(u^2).
        u, flat = x[:rising] / y[:rising], 1 / y[rising:]
        slope = float(u.sum() / (u @ u))
        plateau = float(flat.sum() / (flat @ flat)) if len(flat) else slope * float(x[-1])
        error = float((((np.minimum(slope * x, plateau) - y) / y) ** 2).sum())
        fits.append((error, slope, plateau))
    _, slope, plateau = min(fits, key=lambda fit: fit[0])
    load = plateau / slope
    return Knee(load=load, slope=slope, plateau=plateau, reached=load < float(x[-1]))


def is_flat(throughputs: Sequence[float]) -> bool:
    """Return whether neither of the last two loads exceeds the best earlier load by `GAIN`."""
    if len(throughputs) < MIN_POINTS:
        return False
    return max(throughputs[-2:]) < GAIN * max(throughputs[:-2])


def knee_of(points: Sequence[Point]) -> Knee | None:
    """Return the knee of loads in ascending order; None for other orders. A rate with few
    random arrivals looks like a knee, so a knee of rates is `reached` only if calls piled up."""
    loads = [point.load.value for point in points]
    knee = find_knee(loads, throughputs(points)) if loads == sorted(set(loads)) else None
    by_rate = points[0].load.rate_per_s is not None
    if knee is not None and by_rate and not any(point.report.saturated for point in points):
        return replace(knee, reached=False)
    return knee


def document_of(points: Sequence[Point], capacity: Capacity | None = None) -> Measured | Sweep:
    """Return the document of --json: a single report, or a sweep; a search is always a sweep."""
    if len(points) == 1 and capacity is None:
        return points[0].report
    return Sweep(
        over="concurrency" if points[0].load.rate_per_s is None else "rate_per_s",
        loads=tuple(point.load.value for point in points),
        reports=tuple(point.report for point in points),
        knee=knee_of(points),
        capacity=capacity,
    )
