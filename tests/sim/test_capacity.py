"""The search gives the capacity that a formula gives, and a wrong search does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from cbatch.core.scheduler.config import SchedulerConfig
from sim.cost.base import constant_cost
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.capacity import (
    MAX_GROWTH,
    MIN_REQUESTS,
    Capacity,
    ServiceLevel,
    Trial,
    find_capacity,
    judge,
    try_rate,
)
from sim.report.report import Objectives, Record
from sim.workload.sources import OpenLoop
from sim.workload.traces.request import TraceRequest

STEP_S, OUTPUT_TOKENS, REQUESTS = 0.01, 3, 60
SERVICE_S = STEP_S * OUTPUT_TOKENS
GAP_S = 0.06
WIDE = {"lowest": 1 / 8, "highest": 8.0}


def serving(
    level: ServiceLevel, output_tokens: int = OUTPUT_TOKENS, requests: int = REQUESTS
) -> Callable[..., Trial]:
    """One slot, `requests` at regular intervals, every step the same: a D/D/1 queue."""
    config = SchedulerConfig(num_blocks=100, max_num_seqs=1, max_model_len=500)

    def serve(rate: float, rounds: int = 1) -> Trial:
        arriving = (
            TraceRequest(arrival_s=i * GAP_S / rate, prompt_tokens=9, output_tokens=output_tokens)
            for i in range(requests * rounds)
        )
        executor = FakeExecutor(max_num_seqs=1, cost=constant_cost(step_s=STEP_S))
        records: list[Record] = []
        report = replay(
            OpenLoop(arriving),
            config,
            executor,
            objectives=level.objectives,
            on_record=records.append,
        )
        return judge(rate, report, records, level, rounds)

    return serve


def expected_rate(ttft_s: float, rank: float) -> float:
    """Return the rate by the formula. Request i waits for i (service - gap) once the gap is
    shorter: TTFT at `rank` of the last index is that wait and one step."""
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


LENIENT = {"ttft": Objectives(ttft_s=0.5), "tpot": Objectives(tpot_s=0.02)}


@pytest.mark.parametrize("name", LENIENT)
@pytest.mark.parametrize("requests", [4, 60, 500])
def test_a_burst_is_no_capacity(name: str, requests: int) -> None:
    """A growing queue is no capacity, however short the trace and lenient the objective."""
    serve = serving(ServiceLevel(objectives=LENIENT[name]), requests=requests)
    capacity = find_capacity(lambda rate: try_rate(partial(serve, rate)), **WIDE)
    assert capacity.best is not None
    service_rate = GAP_S / SERVICE_S
    assert 0.98 * service_rate <= capacity.best.rate <= (1 + MAX_GROWTH) * service_rate
    assert (capacity.best.rounds > 1) == (requests < MIN_REQUESTS)


def test_a_single_round_takes_a_burst_for_a_capacity() -> None:
    """Broken variant of the test above: it searches with a single round."""
    serve = serving(ServiceLevel(objectives=LENIENT["ttft"]), requests=4)
    best = find_capacity(serve, **WIDE).best
    assert best is not None and best.rate > 1.5 * GAP_S / SERVICE_S


def test_a_share_of_good_requests_has_a_closed_form() -> None:
    """With 90 % within the objective, the request at nine tenths of the queue waits exactly that
    long."""
    objectives = Objectives(ttft_s=0.5)
    share = ServiceLevel(objectives=objectives, percentile=None, goodput_share=0.9)
    capacity = find_capacity(serving(share), **WIDE)
    assert is_bracketed(capacity, expected_rate(0.5, (0.9 * REQUESTS - 1) / (REQUESTS - 1)))
    both = ServiceLevel(objectives=objectives, percentile=99.0, goodput_share=0.9)
    stricter = find_capacity(serving(both), **WIDE)
    assert is_bracketed(stricter, expected_rate(0.5, 0.99))
