"""Calls over real sockets: good ends, bad ends, and their names."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.load.client.bodies import Bodies, BodySettings, PromptText
from bench.load.client.http import Endpoint, TimedCall
from bench.load.run import drive as driving
from bench.load.run.measure import LoadRun, measure
from cbatch.core.request.errors import FieldError
from sim.workload.traces.request import TraceRequest
from tests.bench.load.scripted import (
    DONE,
    STREAM_HEAD,
    Exchange,
    Script,
    answer_well,
    calls_of,
    chunk,
    plan,
    run_plan,
    scripted,
    usage,
)

WHOLE = {
    "choices": [{"text": "abc", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}


def one(script: Script, **more: Any) -> TimedCall:
    with scripted(script) as server:
        (call,) = calls_of(plan(server.endpoint, **more))
    return call


def raw(content: bytes, *, close: bool = True) -> Callable[[Exchange], Any]:
    async def script(exchange: Exchange) -> None:
        await exchange.send(content)
        if close:
            exchange.close()

    return script


def whole(body: bytes, status: str = "200 OK", length: int | None = None) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(body, status, length)
        exchange.close()

    return script


async def _cut_stream(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(chunk("a", 1))
    exchange.close()


async def _slow_in_the_middle(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event(chunk("a", 1))
    await asyncio.sleep(60)


BUSY = json.dumps({"error": {"message": "busy", "type": "x"}}).encode()
GOOD = chunk("a", 1, reason="stop") + usage(1) + DONE


@pytest.mark.parametrize(
    ("script", "label", "more"),
    [
        (answer_well, None, {}),
        (raw(STREAM_HEAD + b"\r\n" + GOOD), None, {}),  # its end is that of the connection
        (raw(STREAM_HEAD.replace(b"1.1", b"1.0") + b"\r\n" + GOOD), None, {}),
        (whole(json.dumps(WHOLE).encode()), None, {"streamed": False}),
        (whole(BUSY, "503 Service Unavailable"), "status 503", {}),
        (whole(b"", "404 Not Found"), "status 404", {}),
        (raw(b""), "cut", {}),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Le"), "cut", {}),
        (_cut_stream, "cut", {}),
        (whole(json.dumps(WHOLE).encode(), length=500), "cut", {"streamed": False}),
        (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), "malformed", {}),
        (raw(STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"), "malformed", {}),
        (whole(b'{"choices": ['), "malformed", {"streamed": False}),
        (raw(STREAM_HEAD + b"\r\n" + chunk("a", 1) + b"data: {"), "malformed", {}),
        (whole(b""), "empty", {"streamed": False}),
        (whole(b"", length=0), "empty", {}),
        (raw(STREAM_HEAD + b"\r\n" + chunk("a", 1)), "truncated", {}),
        (_slow_in_the_middle, "timeout", {"timeout_s": 0.2}),
    ],
)
def test_endings_have_their_names(script: Script, label: str | None, more: Any) -> None:
    call = one(script, **more)
    assert (None if call.error is None else call.error.label) == label, call.error
    if label == "status 503":
        assert call.error is not None and "busy" in call.error.detail


def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    async def leave_after_two(exchange: Exchange) -> None:
        if exchange.place == 2:  # closed while the next request was on its way
            exchange.close()
        else:
            await answer_well(exchange)

    with scripted(leave_after_two) as server:
        calls = calls_of(plan(server.endpoint, count=6))
        assert [call.error for call in calls] == [None] * 6
        assert server.connections == 3  # two calls each; the third of each was sent again
    with scripted(answer_well) as server:
        assert len(calls_of(plan(server.endpoint, count=200, concurrency=16))) == 200
        assert server.connections == 16


def test_a_call_on_a_kept_connection_that_has_begun_is_not_sent_again() -> None:
    async def cut_second(exchange: Exchange) -> None:
        if exchange.number == 1:
            await _cut_stream(exchange)
        else:
            await answer_well(exchange)

    with scripted(cut_second) as server:
        calls = calls_of(plan(server.endpoint, count=3))
        labels = [None if call.error is None else call.error.label for call in calls]
        assert labels == [None, "cut", None] and len(server.bodies) == 3


INTERIM = {
    "103": b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n",
    "two of HTTP/1.0": b"HTTP/1.0 100 Continue\r\n\r\nHTTP/1.0 102 Processing\r\n\r\n",
    "with close": b"HTTP/1.1 103 Early Hints\r\nConnection: close\r\n\r\n",
    "without a carriage return": b"HTTP/1.1 103\nLink: </x>\n\n",
}


@pytest.mark.parametrize("name", INTERIM)
@pytest.mark.parametrize("piece_bytes", [1, 10_000])
def test_interim_responses_are_passed_over(name: str, piece_bytes: int) -> None:
    async def script(exchange: Exchange) -> None:
        raw = INTERIM[name]
        for start in range(0, len(raw), piece_bytes):
            await exchange.send(raw[start : start + piece_bytes])
            await asyncio.sleep(0.001)
        await answer_well(exchange)

    with scripted(script) as server:
        calls = calls_of(plan(server.endpoint, count=3))
        assert [call.error for call in calls] == [None] * 3
        assert server.connections == 1, "the connection is kept"


@pytest.mark.parametrize(
    ("raw_bytes", "label"),
    [
        (INTERIM["103"], "cut"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n", "status 101"),
        (b"HTTP/1.1 103 \r\n" + b"X: y\r\n" * 12_000, "cut"),
    ],
)
def test_an_interim_response_alone_is_no_answer(raw_bytes: bytes, label: str) -> None:
    call = one(raw(raw_bytes))
    assert call.error is not None and call.error.label == label


def test_urls() -> None:
    for url, expected in {
        "http://a:8000": Endpoint("a", 8000, False, ""),
        "a:8000": Endpoint("a", 8000, False, ""),
        "https://a/v1/": Endpoint("a", 443, True, ""),
        "http://[::1]:9/x/v1": Endpoint("::1", 9, False, "/x"),
    }.items():
        assert Endpoint.of(url) == expected
    for url in ("ftp://a", "http://", "http://a:port", "http://a:99999"):
        with pytest.raises(FieldError, match="URL"):
            Endpoint.of(url)


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
    stalled_until_s = min(call.sent_s for call in closed.calls) + STALL_S - 0.001
    assert sum(call.sent_s < stalled_until_s for call in closed.calls) == 1 < len(closed.calls)


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
