"""Sources, the knee, counters of a server, workloads by their names, and the split of a plan."""

from __future__ import annotations

import asyncio
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.load.client.bodies import PromptText
from bench.load.client.http import CallError, Endpoint, Failure
from bench.load.run.drive import ClosedSessions, ramped, split
from bench.load.run.measure import LoadRun, measure
from bench.load.run.options import OfferedLoad, read_items
from bench.load.run.report import Measured, Scrape, difference, parse, samples_of
from bench.load.run.sweep import (
    SEARCH_RANGE,
    TOLERANCE,
    Point,
    document_of,
    find_knee,
    find_rate,
    is_flat,
    knee_of,
    throughputs,
    to_trial,
)
from cbatch.core.request.errors import FieldError
from sim.report.capacity import Capacity
from sim.report.report import Objectives, to_json
from sim.workload.arrivals import constant
from sim.workload.sources import Source
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import plan
from tests.bench.load.test_measure import run_of, steady_calls


def request(output: int = 1, session: str | None = None, think_s: float | None = None) -> Any:
    return TraceRequest(
        arrival_s=0.0, prompt_tokens=4, output_tokens=output, session=session, think_s=think_s
    )


def play(source: Source) -> list[tuple[float, int]]:
    """Return when each request was sent, in order, for a server that takes n seconds for an output
    of n tokens."""
    running: list[tuple[float, int, TraceRequest]] = []
    sent: list[tuple[float, int]] = []
    while True:
        due_s = source.next_arrival_s()
        ends_s = min((end for end, *_ in running), default=math.inf)
        if due_s is None and not running:
            return sent
        if due_s is not None and due_s <= ends_s:
            index, taken = source.take()
            sent.append((due_s, index))
            running.append((due_s + taken.output_tokens, index, taken))
        else:
            running.sort(key=lambda call: call[:2])
            end_s, _, ended = running.pop(0)
            source.ended(ended, end_s)


def test_turns_wait_for_each_other() -> None:
    a, b = (request(2, "a"), request(3, "a", think_s=4.0)), (request(1, "b"),)
    requests = [*a, *b, request(1, "b", think_s=0.0), request(1)]
    # One client: a, 4 s of thought, a again, b, b, the last.
    assert play(ClosedSessions(requests, 1)) == [(0, 0), (6, 1), (9, 2), (10, 3), (11, 4)]
    # Two clients: the other takes b and the rest.
    assert play(ClosedSessions(requests, 2)) == [(0, 0), (0, 2), (1, 3), (2, 4), (6, 1)]


def test_ramps() -> None:
    sent = play(ClosedSessions([request(1000)] * 5, 5, ramp_s=10.0))
    assert [at_s for at_s, _ in sent] == [0, 2, 4, 6, 8]
    steady = [replace(request(), arrival_s=at_s) for at_s in islice(constant(10), 400)]
    times_s = np.array([each.arrival_s for each in ramped(steady, 8.0)])
    # The rate at t of the ramp is t / 8 of 10 a second; after it, 10.
    for start_s, end_s, expected in ((0, 4, 10), (4, 8, 30), (8, 12, 40), (20, 30, 100)):
        assert abs(((times_s >= start_s) & (times_s < end_s)).sum() - expected) <= 1


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_share_what_their_names_share(as_ids: bool) -> None:
    text = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(5000))
    corpus = PromptText(text, 2.0, tuple(range(2500)) if as_ids else None)

    def of(index: int, names: tuple[int, ...] | None, tokens: int) -> Any:
        named = {"hash_ids": names, "hash_block_tokens": names and 8}
        made = TraceRequest(arrival_s=0.0, prompt_tokens=tokens, output_tokens=1, **named)
        return corpus.prompt(1, index, made, as_ids=as_ids)

    size = 1 if as_ids else 2  # of a token
    first, second, other = of(0, (5, 6, 7), 20), of(1, (5, 6, 9), 24), of(2, (4, 6), 16)
    assert [len(each) // size for each in (first, second, other)] == [20, 24, 16]
    assert first[: 16 * size] == second[: 16 * size] and first[16 * size :] != second[16 * size :]
    assert (
        other[: 8 * size] != first[: 8 * size] and other[8 * size :] == first[8 * size : 16 * size]
    )
    assert of(3, None, 30) != of(4, None, 30) and of(3, None, 30) == of(3, None, 30)


def test_knee() -> None:
    rng = np.random.default_rng(0)
    loads = [1, 2, 4, 8, 16, 32, 64]
    made = [min(10 * load, 110) * (1 + 0.02 * rng.normal()) for load in loads]
    knee = find_knee(loads, made)
    assert knee is not None and knee.reached
    assert knee.load == pytest.approx(11, rel=0.05) and knee.plateau == pytest.approx(110, rel=0.03)
    rising = find_knee(loads, [10 * load for load in loads])
    assert rising is not None and not rising.reached
    assert find_knee([1, 2], [1, 2]) is None and find_knee([1, 2, 3], [1, 0, 2]) is None
    assert is_flat([10, 20, 40, 41, 40]) and not is_flat([10, 20, 40, 41])
    assert not is_flat([10, 20, 40, 39, 60]) and not is_flat([10, 10])


def test_arrivals_by_chance_make_no_knee() -> None:
    """The server serves 16 requests a second. It was offered 4, 8 and 16, of which fewer came, and
    32."""

    def point(rate_per_s: float, served_per_s: float, offered: float) -> Point:
        calls = steady_calls(offered, served_per_s)
        run = run_of(calls, open_loop=True)
        return Point(OfferedLoad(rate_per_s=rate_per_s), [run], measure([run], settings={}))

    points = [point(4, 16, 4), point(8, 16, 8), point(16, 16, 12)]
    knee = knee_of(points)
    assert knee is not None and not knee.reached
    by_fit = find_knee([4, 8, 16], throughputs(points))
    assert by_fit is not None and by_fit.reached, "what the fit alone would say"
    knee = knee_of([*points[:2], point(16, 16, 15), point(32, 16, 32)])
    assert knee is not None and knee.reached and knee.load == pytest.approx(16, rel=0.05)


PAGE = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} {4}
vllm:num_requests_waiting{{engine="1"}} 2
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.75
vllm:kv_cache_usage_perc{{engine="1"}} 0.5
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="a",engine="0"}} {0}
vllm:generation_tokens_total{{model_name="a",engine="1"}} 5
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{model_name="a"}} {1}
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{model_name="a"}} {2}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{model_name="a"}} {3}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {3}
# TYPE cbatch:steps_total counter
cbatch:steps_total 7
# TYPE other:generation_tokens_total counter
other:generation_tokens_total 999
"""


def test_counters_are_differences() -> None:
    before, after = (
        Scrape(100.0 + at, parse(PAGE.format(*values)))
        for at, values in enumerate(((10, 1, 9, 2, 9), (110, 11, 39, 17, 3)))
    )
    counters = difference(before, after)
    assert counters is not None
    assert (counters.output_tokens, counters.drafts, counters.drafted_tokens) == (100, 10, 30)
    assert (counters.acceptance, counters.accepted_length) == (0.5, 2.5)
    assert counters.accepted_by_position == (15,) and counters.steps == 0
    assert counters.preemptions is None
    assert difference(after, before) is None  # it was restarted
    assert difference(None, after) is None and difference(before, None) is None
    # Samples have gauges: the queue gets shorter, which is no counter that decreased.
    first, second = samples_of([before, after], 99.5)
    assert (first.at_s, second.at_s) == (0.5, 1.5)
    assert (first.waiting, second.waiting) == (11, 5) and second.kv_share == 0.75
    assert (first.output_tokens, first.drafted_tokens) == (0, 0)
    assert (second.output_tokens, second.drafted_tokens, second.accepted_tokens) == (100, 30, 15)
    assert second.running is None and second.prompt_tokens is None


def test_prompt_files(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_text("one\n\ntwo\n", encoding="utf-8")
    assert [item.prompt for item in read_items(lines, chat=False)] == ["one", "two"]
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": [1, 2], "max_tokens": 3, "top_k": 4}\n', encoding="utf-8")
    (item,) = read_items(rows, chat=False)
    assert item.prompt == [1, 2] and item.fields == {"max_tokens": 3, "top_k": 4}
    for bad in ("{}", "[]", "{", '{"prompt": "a", "n": 2}', '{"prompt": "a", "stream": false}'):
        rows.write_text(f'{{"prompt": "a"}}\n{bad}\n', encoding="utf-8")
        with pytest.raises(FieldError, match="line 2"):
            read_items(rows, chat=False)
    rows.write_text('{"messages": [{"role": "user", "content": "x"}]}', encoding="utf-8")
    assert read_items(rows, chat=True)[0].messages is not None
    with pytest.raises(FieldError, match="--chat"):
        read_items(rows, chat=False)


def test_a_plan_is_shared_out_and_sessions_stay_whole() -> None:
    sessions = [request(session=f"s{i // 3}", think_s=0.0) for i in range(24)]
    requests = (*sessions, *[request() for _ in range(5)])
    whole = replace(plan(Endpoint("x", 1, False, ""), count=29, concurrency=7), requests=requests)
    parts = split(whole, 3)
    assert sorted(index for part in parts for index in part.indices) == list(range(29))
    assert [part.concurrency for part in parts] == [3, 2, 2]
    owners: dict[str, set[int]] = {}
    for number, part in enumerate(parts):
        for index, shared in zip(part.indices, part.requests, strict=True):
            assert shared is requests[index]
            if shared.session is not None:
                owners.setdefault(shared.session, set()).add(number)
    assert all(len(owner) == 1 for owner in owners.values())
    assert split(whole, 1) == [whole]
    with pytest.raises(FieldError, match="processes"):
        split(whole, 8)


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
