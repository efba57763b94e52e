"""Runs in real time. No test here depends on the speed of the machine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.load.client.bodies import Bodies, BodySettings, PromptText
from bench.load.run import drive as driving
from bench.load.run.measure import LoadRun, measure
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import (
    Exchange,
    answer_well,
    calls_of,
    plan,
    run_plan,
    scripted,
)

STALL_S = 0.4


def test_an_open_loop_sees_a_stall_that_a_closed_one_hides() -> None:
    """Requests due in a stall wait for its end, each from its own time. A client that waits for its
    answers sends one request into the stall: it would report the p99 of a server without one."""
    times_s = [i / 100 for i in range(100)]
    ends_s: list[float] = []

    async def script(exchange: Exchange) -> None:
        now_s = time.monotonic()
        ends_s[:] = ends_s or [now_s + STALL_S]  # the stall begins with the first request
        if now_s < ends_s[0]:
            await asyncio.sleep(ends_s[0] - now_s)
        await answer_well(exchange)

    with scripted(script) as server:
        part = run_plan(plan(server.endpoint, arrivals_s=times_s))
    calls = sorted(part.calls, key=lambda call: call.scheduled_s)
    assert [call.scheduled_s for call in calls] == times_s and not any(c.error for c in calls)
    report = measure([LoadRun([part], open_loop=True)], settings={})
    # The stall does not end before the first request was sent, plus its length.
    waits_s = [max(calls[0].sent_s + STALL_S - at_s, 0.0) for at_s in times_s]
    for call, wait_s in zip(calls, waits_s, strict=True):
        assert call.e2e_s >= wait_s - 0.001
    assert report.e2e_s.p90 is not None
    assert report.e2e_s.p90 >= float(np.percentile(waits_s, 90)) - 0.001 > 0.2
    ends_s.clear()
    with scripted(script) as server:
        closed = run_plan(plan(server.endpoint, end_s=1.0, cycle=True))
    assert sum(call.e2e_s > 0.2 for call in closed.calls) == 1


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
    part = driving.Part(calls, 0, False, 0.1, 1.0)
    report = measure([LoadRun([part], open_loop=True)], settings={})
    assert max(call.sent_s - call.scheduled_s for call in calls) >= held_s
    assert report.e2e_s.max is not None and report.e2e_s.max >= held_s
    for call in calls:
        late_s = call.sent_s - call.scheduled_s
        assert call.e2e_s - (call.end_s - call.sent_s) == pytest.approx(late_s)
    assert any("late" in warning for warning in report.warnings)


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
