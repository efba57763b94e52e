"""The search for the highest rate within objectives, on a server simulated by arithmetic."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.load.client.http import CallError, Failure
from bench.load.run.measure import LoadRun, measure
from bench.load.run.options import OfferedLoad
from bench.load.run.report import Measured
from bench.load.run.sweep import SEARCH_RANGE, TOLERANCE, Point, document_of, find_rate, to_trial
from sim.report.capacity import Capacity
from sim.report.report import Objectives, to_json
from tests.bench.load.test_measure import run_of, steady_calls

SERVED_PER_S = 37.0


class Queue:
    """A runner of a server that serves at most `SERVED_PER_S` requests a second."""

    def __init__(self, *, refuses_from_per_s: float = 1e9, stops_after: int = 99) -> None:
        self.rates: list[float] = []
        self._refuses_from_per_s, self._stops_after = refuses_from_per_s, stops_after

    async def runs(self, load: OfferedLoad, number: int) -> list[LoadRun]:
        assert number == len(self.rates) and load.rate_per_s is not None
        self.rates.append(load.rate_per_s)
        # So long that a queue which grows by a hundredth is late in the end.
        calls = steady_calls(load.rate_per_s, SERVED_PER_S, span_s=max(20.0, 100 / load.rate_per_s))
        if load.rate_per_s >= self._refuses_from_per_s:
            for call in calls[::10]:
                call.error = CallError(Failure.STATUS, "full", 503)
        return [run_of(calls, open_loop=True, interrupted=number + 1 >= self._stops_after)]


def searched(
    queue: Any, first_per_s: float, share: float = 0.99, e2e_s: float = 0.2
) -> tuple[list[Point], Capacity | None]:
    def report(load: OfferedLoad, runs: list[LoadRun]) -> Measured:
        return measure(runs, settings={}, objectives=Objectives(e2e_s=e2e_s))

    return asyncio.run(find_rate(queue, first_per_s, share, report))


@pytest.mark.parametrize("first_per_s", [9.0, 150.0])
def test_it_finds_what_the_server_can_take(first_per_s: float) -> None:
    points, capacity = searched(queue := Queue(), first_per_s)
    assert capacity is not None and capacity.ends == "between" and capacity.best is not None
    # 1 % of the calls, and 0.2 s of queue over 20 s, may be late.
    assert SERVED_PER_S / (1 + TOLERANCE) < capacity.best.rate < SERVED_PER_S * 1.03
    assert [each.rate for each in capacity.tried] == queue.rates
    assert [point.load.value for point in points] == sorted(queue.rates)
    document = to_json(document_of(points, capacity))
    assert b'"capacity"' in document and b"cbatch-sweep" in document


def test_refused_calls_have_kept_nothing() -> None:
    """All served calls are in time: a search that counts only these would go on to 37."""
    _, capacity = searched(Queue(refuses_from_per_s=12.0), 4.0)
    assert capacity is not None and capacity.best is not None
    assert 12.0 / (1 + TOLERANCE) < capacity.best.rate < 12.0
    failed = [each for each in capacity.tried if not each.meets]
    assert all(each.goodput_share == pytest.approx(0.9, abs=0.01) for each in failed[-1:])


def test_calls_that_pile_up_are_no_success_though_the_run_was_short() -> None:
    for served_per_s, meets in ((15, False), (40, True)):
        run = run_of(steady_calls(20, served_per_s), open_loop=True)
        report = measure([run], settings={}, objectives=Objectives(e2e_s=60))
        assert report.goodput is not None and report.goodput.share == 1.0
        assert report.saturated is not meets and to_trial(20.0, report, 0.99).meets is meets


def test_a_burst_is_called_too_short() -> None:
    """Answers take 25 ms."""
    for span_s, too_short in ((0.2, True), (20.0, False)):
        run = run_of(steady_calls(20, 40.0, span_s=span_s), open_loop=True)
        report = measure([run], settings={}, objectives=Objectives(e2e_s=60))
        assert to_trial(20.0, report, 0.99).too_short is too_short


def test_the_range_has_ends_and_a_search_can_be_stopped() -> None:
    _, capacity = searched(queue := Queue(), 64.0, e2e_s=1e-6)
    assert capacity is not None and capacity.ends == "lowest fails" and capacity.best is None
    assert min(queue.rates) == 64.0 / SEARCH_RANGE
    points, stopped = searched(Queue(stops_after=3), 2.0)
    assert stopped is None and len(points) == 3
