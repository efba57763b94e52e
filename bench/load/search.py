"""The highest rate at which a server keeps its objectives: a run at one rate after another."""

from __future__ import annotations

from collections.abc import Generator

from bench.load.report import Measured
from bench.load.runner import Load, Runner
from bench.load.sweep import Begin, Measure, Point, measure_each
from sim.capacity import Capacity, Tried, search_rates

TOLERANCE = 0.05  # runs at the same rate differ by more than less would tell apart
RANGE = 64.0  # times the first rate, and a part of it


async def find_rate(
    runner: Runner,
    first_per_s: float,
    share: float,
    measure: Measure,
    *,
    begin: Begin | None = None,
) -> tuple[list[Point], Capacity | None]:
    """The points in ascending order. A rate is met if so large a `share` of all that was sent met
    every objective, and calls did not pile up. The capacity is None if the search was stopped."""
    search = search_rates(
        first_per_s,
        lowest=first_per_s / RANGE,
        highest=first_per_s * RANGE,
        tolerance=TOLERANCE,
    )
    points, capacity = await measure_each(runner, _loads(search, share), measure, begin)
    return sorted(points, key=lambda point: point.load.value), capacity


def _loads(
    search: Generator[float, Tried, Capacity], share: float
) -> Generator[Load, Point, Capacity]:
    rate_per_s = next(search)
    while True:
        point = yield Load(rate_per_s=rate_per_s)
        try:
            rate_per_s = search.send(tried(rate_per_s, point.report, share))
        except StopIteration as end:
            capacity: Capacity = end.value
            return capacity


def tried(rate_per_s: float, report: Measured, share: float) -> Tried:
    # No goodput: not a single call succeeded.
    reached = 0.0 if report.goodput is None else report.goodput.share
    return Tried(
        rate=rate_per_s,
        meets=reached >= share and not report.saturated,
        arrivals_per_s=report.sent / report.duration_s if report.duration_s else 0.0,
        output_tokens_per_s=report.output_tokens_per_s,
        ttft_s=None,
        tpot_s=None,
        e2e_s=None,
        goodput_share=reached,
    )
