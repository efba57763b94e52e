"""Search for the highest rate that meets a service level: bracketed by doubling, then bisected.

A rate is a factor on the trace's own rate, for a load test requests per second. It is tried by
replaying the trace, or by a load test of a server. The search assumes that higher rates are never
better, which holds for a queue except for noise.

A short trace meets the objectives at any rate, if it ends before the queue grows long. So a trace
that is short for its rate is repeated. A rate passes only if the time to first token does not grow
over the arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Literal

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import MAX_FLOAT
from sim.report.report import Objectives, Record, Report

TOLERANCE = 0.02  # maximum relative gap between the best rate and the lowest failed rate
MAX_GROWTH = 0.01  # growth of TTFT, in seconds per second, beyond which arrivals outrun the engine
SPAN_LATENCIES = 10  # minimum length of the arrivals, in mean latencies of a request or session
MIN_REQUESTS = 300  # minimum number of requests or sessions of a sustained load
MAX_REQUESTS = 10_000  # limit of a repeated trace
_EXTENSIONS = 2  # runs after the first; each is as long as the last run's latencies require
Ends = Literal["between", "lowest fails", "highest meets"]


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for a run: `percentile`, `goodput_share` or both. `percentile`: this percentile of
    each time, over finished requests, must be within its objective. `goodput_share`: at least this
    share of all sent requests must meet every objective."""

    objectives: Objectives
    percentile: float | None = 99.0
    goodput_share: float | None = None

    def __post_init__(self) -> None:
        if self.objectives == Objectives():
            raise FieldError("--slo", "is missing", "give ttft=0.5, tpot=0.05 or e2e=9")
        if self.percentile is None and self.goodput_share is None:
            raise FieldError("--percentile", "is missing", "give it, or --goodput-share")
        if self.percentile is not None and not 0 < self.percentile <= 100:
            problem = f"{self.percentile} is not allowed"
            raise FieldError("--percentile", problem, "use a number in (0, 100]")
        if self.goodput_share is not None and not 0 < self.goodput_share <= 1:
            problem = f"{self.goodput_share} is not allowed"
            raise FieldError("--goodput-share", problem, "use a number in (0, 1]")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one rate; times are at the level's percentile, None if it has none. The trace was
    served `rounds` times in a row. `too_short`: the run was too short to distinguish a burst from a
    sustained load."""

    rate: float
    meets: bool
    arrivals_per_s: float
    output_tokens_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    goodput_share: float | None
    growth: float | None = None  # of the time to first token, seconds per second
    rounds: int = 1
    rounds_needed: int = 1  # limited by `MAX_REQUESTS`
    too_short: bool = False


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search. `best` is the highest rate that met the level; all failed rates are
    higher. It is None if the lowest rate failed. `tried` is in the order of the search."""

    ends: Ends
    best: Trial | None
    tried: tuple[Trial, ...]


def try_rate(serve: Callable[[int], Trial]) -> Trial:
    """Judge a rate. `serve(rounds)` serves the trace at that rate, `rounds` times in a row."""
    trial = serve(1)
    for _ in range(_EXTENSIONS):
        if not trial.meets or trial.rounds >= trial.rounds_needed:
            break
        trial = serve(trial.rounds_needed)
    stable = trial.growth is None or trial.growth <= MAX_GROWTH
    return msgspec.structs.replace(trial, meets=trial.meets and stable)


def rounds_needed(span_s: float, latency_s: float, requests: int = MIN_REQUESTS) -> int:
    """Return how many rounds of arrivals, each over `span_s`, are a sustained load, not a burst."""
    return max(1, math.ceil(SPAN_LATENCIES * latency_s / span_s), -(-MIN_REQUESTS // requests))


def judge(
    rate: float, report: Report, records: list[Record], level: ServiceLevel, rounds: int = 1
) -> Trial:
    """Judge a run by the service level alone; `try_rate` also limits the growth of TTFT. Raises
    `FieldError` if nothing finished, or if the trace has no rate."""
    if not records:
        raise FieldError("trace", "none of its requests can run", "give a larger pool or context")
    times_s = np.array([record.arrival_s for record in records])
    span_s = float(np.ptp(times_s))
    if not span_s:
        raise FieldError(
            "trace", "its requests all arrive at once", "give one with a rate to change"
        )
    percentiles: dict[str, float | None] = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"))
    meets = True
    if level.percentile is not None:
        for name in percentiles:
            values = [v for v in (getattr(record, name) for record in records) if v is not None]
            seconds = float(np.percentile(values, level.percentile)) if values else None
            limit_s, percentiles[name] = getattr(level.objectives, name), seconds
            meets = meets and (seconds is None or limit_s is None or seconds <= limit_s)
    later = times_s >= times_s.min() + span_s / 10  # the engine is empty at first
    ttft_s = np.array([record.ttft_s for record in records])
    growth = float(np.polyfit(times_s[later], ttft_s[later], 1)[0]) if later.sum() > 2 else None
    visits: dict[str | int, tuple[float, float]] = {}  # begin and end of each session
    for r in records:
        begin_s, end_s = visits.get(r.session or r.index, (r.arrival_s, 0.0))
        visits[r.session or r.index] = begin_s, max(end_s, r.arrival_s + r.e2e_s)
    begins_s, ends_s = np.array(list(visits.values())).T
    span_of_round_s = max(float(np.ptp(begins_s)) / rounds, 1e-9)
    latency_s = float((ends_s - begins_s).mean())
    needed = rounds_needed(span_of_round_s, latency_s, max(len(visits) // rounds, 1))
    share = None if report.goodput is None else report.goodput.share
    if level.goodput_share is not None:
        meets = meets and share is not None and share >= level.goodput_share
    return Trial(
        rate=rate,
        meets=meets,
        arrivals_per_s=(len(times_s) - 1) / span_s,
        output_tokens_per_s=report.output_tokens_per_s,
        goodput_share=share,
        growth=growth,
        rounds=rounds,
        rounds_needed=max(min(needed, MAX_REQUESTS * rounds // len(records)), 1),
        too_short=needed > 2 * rounds,
        **percentiles,
    )


def find_capacity(
    serve: Callable[[float], Trial],
    *,
    lowest: float,
    highest: float,
    tolerance: float = TOLERANCE,
) -> Capacity:
    """Search from the trace's own rate (1.0), or from the end of the range nearest to it. Raises
    `FieldError` for an empty range."""
    if not 0 < lowest < highest <= MAX_FLOAT:
        raise FieldError(
            "--rate-scales", f"{lowest}:{highest} is not a range", "give LOWEST:HIGHEST"
        )
    first = min(max(1.0, lowest), highest)
    search = search_rates(first, lowest=lowest, highest=highest, tolerance=tolerance)
    rate = next(search)
    while True:
        try:
            rate = search.send(serve(rate))
        except StopIteration as end:
            capacity: Capacity = end.value
            return capacity


def search_rates(
    first: float, *, lowest: float, highest: float, tolerance: float
) -> Generator[float, Trial, Capacity]:
    """Yield rates to try; expect the result of each to be sent back. Return the capacity."""
    tried = [(yield first)]
    up = tried[0].meets
    while tried[-1].meets is up:
        rate = tried[-1].rate
        if rate == (highest if up else lowest):
            return Capacity(
                ends="highest meets" if up else "lowest fails",
                best=tried[-1] if up else None,
                tried=tuple(tried),
            )
        tried.append((yield min(rate * 2, highest) if up else max(rate / 2, lowest)))
    best, failed = sorted(tried[-2:], key=lambda result: result.rate)
    while failed.rate > best.rate * (1 + tolerance):
        tried.append((yield math.sqrt(best.rate * failed.rate)))
        if tried[-1].meets:
            best = tried[-1]
        else:
            failed = tried[-1]
    return Capacity(ends="between", best=best, tried=tuple(tried))
