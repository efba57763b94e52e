"""The highest rate that a service level allows: bracketed by doubling, then bisected.

A rate counts times that of the trace, of a load test requests a second. Whether it is met is found
out by serving the trace at that rate, or by sending it to a server; what lies between two rates is
taken to be monotone, which a queue is but for noise.

A burst is no capacity: any rate meets the objectives if the trace ends before the queue is long. So
a trace that is short for its rate is served several times in a row, and a rate is met only if the
time to first token does not grow from one arrival to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Literal

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from sim.report.report import Objectives, Record, Report

TOLERANCE = 0.02  # between the highest rate that meets and the lowest that fails
MAX_GROWTH = 0.01  # seconds of TTFT a second: by so much arrivals outrun the engine
SPAN_LATENCIES = 10  # arrivals last for so many times the mean latency of a request or session
LEAST_REQUESTS = 300
MAX_REQUESTS = 10_000  # of a trace that is repeated
_EXTENSIONS = 2  # runs after the first; each is as long as the latencies of the last one demand
Ends = Literal["between", "lowest fails", "highest meets"]


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Of all requests that finish, the percentile of each time that has an objective is within it;
    and of all that are sent, so large a share meets every objective. At least one of the two.
    """

    objectives: Objectives
    percentile: float | None = 99.0
    goodput_share: float | None = None

    def __post_init__(self) -> None:
        if self.objectives == Objectives():
            raise FieldError("--slo", "is missing", "give ttft=0.5, tpot=0.05 or e2e=9")
        if self.percentile is None and self.goodput_share is None:
            raise FieldError("--percentile", "is missing", "give it, or --goodput-share")
        if self.percentile is not None and not 0 < self.percentile <= 100:
            wrong = f"{self.percentile} is not allowed"
            raise FieldError("--percentile", wrong, "use a number in (0, 100]")
        if self.goodput_share is not None and not 0 < self.goodput_share <= 1:
            wrong = f"{self.goodput_share} is not allowed"
            raise FieldError("--goodput-share", wrong, "use a number in (0, 1]")


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one rate; times are at the percentile, None without one. The trace was served
    `rounds` times in a row; `too_short`: that was too short to tell a burst from a load."""

    rate: float
    meets: bool
    arrivals_per_s: float
    output_tokens_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    goodput_share: float | None
    growth: float | None = None  # of the time to first token, seconds a second
    rounds: int = 1
    rounds_needed: int = 1  # within `MAX_REQUESTS`
    too_short: bool = False


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """`best` is the highest rate that met the level below all that failed; None: the lowest failed.
    `tried` is in the order of the search."""

    ends: Ends
    best: Tried | None
    tried: tuple[Tried, ...]


def try_rate(serve: Callable[[int], Tried]) -> Tried:
    """Judge a rate. `serve` serves the trace at that rate, so many times in a row."""
    tried = serve(1)
    for _ in range(_EXTENSIONS):
        if not tried.meets or tried.rounds >= tried.rounds_needed:
            break
        tried = serve(tried.rounds_needed)
    stable = tried.growth is None or tried.growth <= MAX_GROWTH
    return msgspec.structs.replace(tried, meets=tried.meets and stable)


def rounds_needed(span_s: float, latency_s: float, requests: int = LEAST_REQUESTS) -> int:
    """Return how often arrivals over `span_s` must be repeated to be a load and not a burst."""
    return max(1, math.ceil(SPAN_LATENCIES * latency_s / span_s), -(-LEAST_REQUESTS // requests))


def judge(
    rate: float, report: Report, records: list[Record], level: ServiceLevel, rounds: int = 1
) -> Tried:
    """Judge a run by the service level alone; `try_rate` adds the growth of the queue. Raises
    `FieldError` if nothing finished, or if the trace has no rate."""
    if not records:
        raise FieldError("trace", "none of its requests can run", "give a larger pool or context")
    times_s = np.array([record.arrival_s for record in records])
    span_s = float(np.ptp(times_s))
    if not span_s:
        raise FieldError("trace", "its requests all come at once", "give one with a rate to change")
    cuts: dict[str, float | None] = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"))
    meets = True
    if level.percentile is not None:
        for name in cuts:
            values = [v for v in (getattr(record, name) for record in records) if v is not None]
            cut = cuts[name] = float(np.percentile(values, level.percentile)) if values else None
            most = getattr(level.objectives, name)
            meets = meets and (cut is None or most is None or cut <= most)
    later = times_s >= times_s.min() + span_s / 10  # it begins with an empty engine
    ttft_s = np.array([record.ttft_s for record in records])
    growth = float(np.polyfit(times_s[later], ttft_s[later], 1)[0]) if later.sum() > 2 else None
    visits: dict[str | int, tuple[float, float]] = {}  # when each session begins and ends
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
    return Tried(
        rate=rate,
        meets=meets,
        arrivals_per_s=(len(times_s) - 1) / span_s,
        output_tokens_per_s=report.output_tokens_per_s,
        goodput_share=share,
        growth=growth,
        rounds=rounds,
        rounds_needed=max(min(needed, MAX_REQUESTS * rounds // len(records)), 1),
        too_short=needed > 2 * rounds,
        **cuts,
    )


def find_capacity(
    serve: Callable[[float], Tried],
    *,
    lowest: float,
    highest: float,
    tolerance: float = TOLERANCE,
) -> Capacity:
    """Begins at the trace's own rate, or at the end of the range that is nearest to it."""
    if not 0 < lowest < highest < math.inf:
        raise FieldError("--rate-scales", f"{lowest}:{highest} is no range", "give LOWEST:HIGHEST")
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
) -> Generator[float, Tried, Capacity]:
    """Yields the rates to try one by one, and is sent what became of each."""
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
    best, failed = sorted(tried[-2:], key=lambda one: one.rate)
    while failed.rate > best.rate * (1 + tolerance):
        tried.append((yield math.sqrt(best.rate * failed.rate)))
        if tried[-1].meets:
            best = tried[-1]
        else:
            failed = tried[-1]
    return Capacity(ends="between", best=best, tried=tuple(tried))
