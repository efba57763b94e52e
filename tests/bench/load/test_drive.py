"""Runs in real time. No test here depends on the speed of the machine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.load.client.bodies import Bodies, BodySettings, PromptText
from bench.load.client.call import TimedCall
from bench.load.run import drive as driving
from bench.load.run.measure import LoadRun, measure
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import (
    DONE,
    Exchange,
    Script,
    answer_well,
    calls_of,
    chunk,
    plan,
    run_plan,
    scripted,
)

STALL_S, EVERY_S = 0.3, 0.75  # duration of a stall, and the period at whose end it is
PERIODS = 2


def stalling(began: list[float], ends: list[tuple[float, float]]) -> Script:
    """A server that answers at once, except in its stalls."""

    async def script(exchange: Exchange) -> None:
        now_s = time.monotonic()
        if not began:
            began.append(now_s)
        into_s = (now_s - began[0]) % EVERY_S
        if into_s >= EVERY_S - STALL_S:
            await asyncio.sleep(EVERY_S - into_s)
            ends.append((now_s, time.monotonic()))
        await answer_well(exchange)

    return script


def test_an_open_loop_sees_stalls_that_a_closed_one_hides() -> None:
    """Requests due in a stall wait for its end, each from its own time. An open loop has them all,
    so the share of slow ones is that of the stalls.

    A client that waits for its answers sends one request into each stall, however long it is: it
    would report the p99 of a server without stalls.
    """
    rate_per_s = 200
    times_s = [i / rate_per_s for i in range(int(PERIODS * EVERY_S * rate_per_s))]
    began: list[float] = []
    with scripted(stalling(began, [])) as server:
        part = run_plan(plan(server.endpoint, arrivals_s=times_s))
    calls = sorted(part.calls, key=lambda call: call.scheduled_s)
    assert [call.scheduled_s for call in calls] == times_s and not any(c.error for c in calls)
    # The server's periods begin when the first request came, which was not before it was sent.
    first_s = calls[0].sent_s
    report = measure([LoadRun([part], open_loop=True)], settings={})
    waits = []
    for call in calls:
        into_s = (call.scheduled_s - first_s) % EVERY_S
        if call.scheduled_s > first_s and into_s >= EVERY_S - STALL_S + 0.1:
            waits.append(EVERY_S - into_s)
            assert call.e2e_s > EVERY_S - into_s - 0.1
    assert len(waits) > 0.2 * len(calls)
    assert report.e2e_s.p99 is not None
    expected = float(np.percentile([0.0] * (len(calls) - len(waits)) + waits, 99))
    assert report.e2e_s.p99 > expected - 0.1
    # A client that blocks would send requests due in a stall after it, and start its clock then.
    assert float(np.percentile(blocking_clock(calls), 99)) < expected - 0.1

    began, ends = [], []
    with scripted(stalling(began, ends)) as server:
        closed = run_plan(plan(server.endpoint, end_s=PERIODS * EVERY_S, cycle=True))
    # One for each stall, though as many were due as above.
    assert 1 <= len(ends) <= PERIODS + 1 < 0.2 * len(waits) and len(closed.calls) >= len(ends)


def blocking_clock(calls: list[TimedCall]) -> list[float]:
    """Return the latencies that a client of one call at a time would have measured for the same
    answers."""
    latencies_s, free_s = [], 0.0
    for call in calls:
        latencies_s.append(max(call.end_s - max(call.scheduled_s, free_s), 0.0))
        free_s = max(free_s, call.end_s)
    return latencies_s


def test_what_the_client_is_late_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's loop is blocked in the middle of a run: requests due then are sent late, and
    their latencies count from when they were due."""
    prepare, held_s = Bodies.prepare, 0.2

    def late(self: Bodies, index: int, request: TraceRequest) -> Any:
        if index == 5:
            time.sleep(held_s)
        return prepare(self, index, request)

    monkeypatch.setattr(Bodies, "prepare", late)
    with scripted(answer_well) as server:
        calls = calls_of(plan(server.endpoint, arrivals_s=[0.01 * i for i in range(20)]))
    part = driving.Part(calls, 0, False, 0.1, 1.0, [0.0])
    report = measure([LoadRun([part], open_loop=True)], settings={})
    assert max(call.sent_s - call.scheduled_s for call in calls) >= held_s
    assert report.e2e_s.max is not None and report.e2e_s.max >= held_s
    for call in calls:
        late_s = call.sent_s - call.scheduled_s
        assert call.e2e_s - (call.end_s - call.sent_s) == pytest.approx(late_s)
    assert any("late" in warning for warning in report.warnings)


def test_no_token_comes_before_it_is_due() -> None:
    """The server sends its tokens at set times."""
    first_s, gap_s, tokens = 0.1, 0.02, 6

    async def script(exchange: Exchange) -> None:
        due_s = time.monotonic() + first_s
        await exchange.begin()
        for count in range(1, tokens + 1):
            await asyncio.sleep(due_s - time.monotonic())
            while time.monotonic() < due_s:  # a timer may fire early
                pass
            await exchange.event(chunk("a", count, reason="length" if count == tokens else None))
            due_s += gap_s
        await exchange.event(DONE)
        await exchange.event(b"")

    with scripted(script) as server:
        calls = calls_of(plan(server.endpoint, count=7, concurrency=3))
    assert len(calls) == 7
    for call in calls:
        assert call.error is None and call.output_tokens == tokens == call.chunks
        assert call.ttft_s >= first_s and call.e2e_s >= first_s + (tokens - 1) * gap_s


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    with scripted(answer_well) as server:
        part = run_plan(plan(server.endpoint, count=60, concurrency=5))
        assert server.connections == 5
    report = measure([LoadRun([part])], settings={})
    assert report.peak_in_flight == 5
    assert report.requests == report.sent == 60 and report.output_tokens == 180


def test_turns_of_a_conversation_go_on_from_what_was_said() -> None:
    turn = TraceRequest(arrival_s=0.0, prompt_tokens=4, output_tokens=3, session="s")
    turns = [turn, *(replace(turn, prompt_tokens=n, think_s=0.0) for n in (9, 14))]
    text: Any = {"corpus": PromptText("abcdefgh" * 99, 1.0), "conversations": True}
    for chat in (False, True):
        bodies = BodySettings(model="m", chat=chat, streamed=True, fields={}, **text)
        with scripted(answer_well) as server:
            sizes: Any = {"requests": tuple(turns), "indices": (0, 1, 2), "total": 3}
            made = driving.PartPlan(endpoint=server.endpoint, bodies=bodies, **sizes)
            assert [call.error for call in calls_of(made)] == [None] * 3
            received = server.bodies
        if chat:
            roles = [message["role"] for message in received[2]["messages"]]
            assert roles == ["user", "assistant", "user", "assistant", "user"]
            assert received[2]["messages"][:3] == received[1]["messages"]
            assert received[2]["messages"][3]["content"] == "aaa"
        else:
            prompts = [body["prompt"] for body in received]
            assert prompts[1].startswith(prompts[0] + "aaa")
            assert prompts[2].startswith(prompts[1] + "aaa")
            # 5 tokens more than before, less the 3 of the answer: the new message
            assert [len(prompt) for prompt in prompts] == [4, 9, 14]


def test_nothing_but_failures_ends_a_run() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(b"{}", "503 Service Unavailable")

    with scripted(refuse) as server:
        part = run_plan(plan(server.endpoint, concurrency=4, cycle=True))
    assert part.gave_up and driving.MAX_FAILURES <= len(part.calls) <= driving.MAX_FAILURES + 4
    report = measure([LoadRun([part])], settings={})
    assert report.requests == 0 and report.errors == {"status 503": len(part.calls)}
    assert report.output_tokens_per_s is None and report.ttft_s.p50 is None


def test_an_interruption_leaves_what_was_measured() -> None:
    async def slow_after_three(exchange: Exchange) -> None:
        if exchange.number >= 3:
            await asyncio.sleep(60)
        await answer_well(exchange)

    async def run(endpoint: Any) -> driving.Part:
        stop, made = asyncio.Event(), plan(endpoint, count=9, concurrency=2)
        driven = driving.drive(made, start_s=time.monotonic(), stop=stop)
        running = asyncio.create_task(driven)
        while len(server.bodies) < 5:
            await asyncio.sleep(0.005)
        stop.set()
        return await running

    with scripted(slow_after_three) as server:
        part = asyncio.run(run(server.endpoint))
    assert len(part.calls) == 3 and part.unfinished == 2
    assert measure([LoadRun([part], interrupted=True)], settings={}).sent == 5
