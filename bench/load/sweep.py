"""Several loads, one after the other, and where more of it stops helping."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from bench.load.knee import find_knee, is_flat
from bench.load.measure import Run
from bench.load.report import Knee, Measured, Sweep, sweep_to_json
from bench.load.runner import Load, Runner
from sim.capacity import Capacity
from sim.report import to_json as report_to_json

MOST_POINTS = 16  # of a sweep that doubles

Result = TypeVar("Result")


class Point(NamedTuple):
    load: Load
    runs: list[Run]
    report: Measured


Measure = Callable[[Load, list[Run]], Measured]
Begin = Callable[[Load], None]


async def sweep(
    runner: Runner,
    loads: Sequence[Load],
    measure: Measure,
    *,
    doubling: bool = False,
    begin: Begin | None = None,
) -> list[Point]:
    """Measures the loads in their order. With `doubling` it goes on from the last, twice the load
    each time, until the last two brought nothing. What an interruption left is reported too."""
    return (await measure_each(runner, _in_order(loads, doubling), measure, begin))[0]


def _in_order(loads: Sequence[Load], doubling: bool) -> Generator[Load, Point, None]:
    points: list[Point] = []
    for load in loads:
        points.append((yield load))
    while doubling and len(points) < MOST_POINTS and not is_flat(throughputs(points)):
        points.append((yield points[-1].load.doubled()))


async def measure_each(
    runner: Runner,
    loads: Generator[Load, Point, Result],
    measure: Measure,
    begin: Begin | None,
) -> tuple[list[Point], Result | None]:
    """The points of the loads that the generator names, which is told each before it names the
    next, and what it returns; None if it was interrupted."""
    points: list[Point] = []
    try:
        load = next(loads)
        while True:
            point = await _measured(runner, load, len(points), measure, begin)
            if point is None:
                return points, None
            points.append(point)
            if point.report.interrupted:
                return points, None
            load = loads.send(point)
    except StopIteration as end:
        return points, end.value


async def _measured(
    runner: Runner, load: Load, number: int, measure: Measure, begin: Begin | None
) -> Point | None:
    """`number` is that of the load among those of a command. None: it was stopped before a call
    was over."""
    if begin is not None:
        begin(load)
    runs = [run for run in await runner.runs(load, number) if run.calls]
    return Point(load, runs, measure(load, runs)) if runs else None


def throughputs(points: Sequence[Point]) -> list[float]:
    """Output tokens a second: of the steady windows where every point has one, which leaves out
    ramps and drains, else of the whole runs."""
    reports = [point.report for point in points]
    windows = [report.steady for report in reports]
    steady = [window.output_tokens_per_s for window in windows if window is not None]
    return steady if len(steady) == len(reports) else [r.output_tokens_per_s or 0 for r in reports]


def knee_of(points: Sequence[Point]) -> Knee | None:
    """Of loads in ascending order; of others there is none. Rates are arrivals drawn by chance, of
    which some runs have fewer: their knee is reached only if calls piled up."""
    loads = [point.load.value for point in points]
    if loads != sorted(set(loads)):
        return None
    knee = find_knee(loads, throughputs(points))
    by_rate = points[0].load.rate_per_s is not None
    if knee is not None and by_rate and not any(point.report.saturated for point in points):
        return replace(knee, reached=False)
    return knee


def to_json(points: Sequence[Point], capacity: Capacity | None = None) -> bytes:
    """A report, or a sweep of them; a search is one even if it tried a single rate."""
    if len(points) == 1 and capacity is None:
        return report_to_json(points[0].report)
    by_rate = points[0].load.rate_per_s is not None
    return sweep_to_json(
        Sweep(
            over="rate_per_s" if by_rate else "concurrency",
            loads=tuple(point.load.value for point in points),
            reports=tuple(point.report for point in points),
            knee=knee_of(points),
            capacity=capacity,
        )
    )
