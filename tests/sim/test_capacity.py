"""The capacity found is the one that can be worked out, and a wrong search is told from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cbatch.core.config import SchedulerConfig
from cbatch.core.errors import FieldError
from sim.capacity import Capacity, ServiceLevel, Tried, find_capacity, judge
from sim.costs import ConstantCost
from sim.modelled import ModelledExecutor
from sim.replay import replay
from sim.report import Objectives, Record
from sim.sources import OpenLoop
from sim.traces.request import TraceRequest

STEP_S, OUTPUT_TOKENS, REQUESTS = 0.01, 3, 60
SERVICE_S = STEP_S * OUTPUT_TOKENS
GAP_S = 0.06
WIDE = {"lowest": 1 / 8, "highest": 8.0}


def serving(level: ServiceLevel, output_tokens: int = OUTPUT_TOKENS) -> Callable[[float], Tried]:
    """One slot, `REQUESTS` requests in steady succession, every step the same: a D/D/1 queue."""
    config = SchedulerConfig(num_blocks=100, max_slots=1, max_model_tokens=500)

    def serve(rate: float) -> Tried:
        requests = (
            TraceRequest(arrival_s=i * GAP_S / rate, prompt_tokens=9, output_tokens=output_tokens)
            for i in range(REQUESTS)
        )
        executor = ModelledExecutor(max_slots=1, cost=ConstantCost(step_duration_s=STEP_S))
        records: list[Record] = []
        report = replay(
            OpenLoop(requests),
            config,
            executor,
            objectives=level.objectives,
            on_record=records.append,
        )
        return judge(rate, report, records, level)

    return serve


def expected_rate(ttft_s: float, rank: float) -> float:
    """Request i waits for i (service - gap) once the gap is shorter: TTFT at `rank` of the last
    index is that wait and one step."""
    wait_s = (ttft_s - STEP_S) / (rank * (REQUESTS - 1))
    return GAP_S / (SERVICE_S - wait_s)


def is_bracketed(capacity: Capacity, rate: float) -> bool:
    failed = min(one.rate for one in capacity.tried if not one.meets)
    assert capacity.best is not None
    return capacity.best.rate <= rate <= failed <= capacity.best.rate * 1.02


@pytest.mark.parametrize(("ttft_s", "percentile"), [(0.5, 99.0), (0.5, 50.0), (0.02, 99.0)])
def test_a_queue_of_fixed_times_has_a_closed_form(ttft_s: float, percentile: float) -> None:
    level = ServiceLevel(objectives=Objectives(ttft_s=ttft_s), percentile=percentile)
    capacity = find_capacity(serving(level), **WIDE)
    rate = expected_rate(ttft_s, percentile / 100)
    assert capacity.ends == "between" and is_bracketed(capacity, rate)
    assert rate > GAP_S / SERVICE_S
    assert capacity.best is not None
    assert capacity.best.arrivals_per_s == pytest.approx(capacity.best.rate / GAP_S)
    assert capacity.tried[0].rate == 1 and len(capacity.tried) < 14


def test_a_wrong_service_time_is_caught() -> None:
    """The test above can fail: a token more, and the closed form is left."""
    level = ServiceLevel(objectives=Objectives(ttft_s=0.5))
    longer = find_capacity(serving(level, OUTPUT_TOKENS + 1), **WIDE)
    assert not is_bracketed(longer, expected_rate(0.5, 0.99))


def test_a_share_of_good_requests_has_a_closed_form() -> None:
    """90 % within the objective: the one at nine tenths of the queue waits just so long."""
    objectives = Objectives(ttft_s=0.5)
    share = ServiceLevel(objectives=objectives, percentile=None, goodput_share=0.9)
    capacity = find_capacity(serving(share), **WIDE)
    assert is_bracketed(capacity, expected_rate(0.5, (0.9 * REQUESTS - 1) / (REQUESTS - 1)))
    both = ServiceLevel(objectives=objectives, percentile=99.0, goodput_share=0.9)
    stricter = find_capacity(serving(both), **WIDE)
    assert is_bracketed(stricter, expected_rate(0.5, 0.99))


def test_both_ends_of_the_range_are_told() -> None:
    loose = ServiceLevel(objectives=Objectives(ttft_s=99.0))
    capacity = find_capacity(serving(loose), **WIDE)
    assert capacity.ends == "highest meets" and capacity.best is not None
    assert capacity.best.rate == 8 and all(one.meets for one in capacity.tried)
    tight = ServiceLevel(objectives=Objectives(tpot_s=STEP_S / 2))
    capacity = find_capacity(serving(tight), **WIDE)
    assert (capacity.ends, capacity.best) == ("lowest fails", None)
    assert capacity.tried[-1].rate == 1 / 8
    above = find_capacity(serving(loose), lowest=3.0, highest=5.0)
    assert [one.rate for one in above.tried] == [3.0, 5.0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ServiceLevel(objectives=Objectives()), "--slo: is missing"),
        (lambda: level(percentile=None), "--percentile: is missing"),
        (lambda: level(percentile=0.0), "--percentile: 0.0"),
        (lambda: level(percentile=float("nan")), "--percentile: nan"),
        (lambda: level(goodput_share=1.5), "--goodput-share: 1.5"),
        (lambda: find_capacity(serving(level()), lowest=2.0, highest=1.0), "--rates"),
        (lambda: find_capacity(serving(level()), lowest=0.0, highest=1.0), "--rates"),
    ],
)
def test_bad_levels_and_ranges_name_their_field(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(FieldError, match=words):
        make()


def level(**more: Any) -> ServiceLevel:
    return ServiceLevel(objectives=Objectives(ttft_s=1.0), **more)
