"""Calls over real sockets: good ends, bad ends, and their names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.load.client.http import Endpoint, TimedCall
from cbatch.core.request.errors import FieldError
from tests.bench.load.scripted import (
    DONE,
    STREAM_HEAD,
    Exchange,
    Script,
    answer_well,
    calls_of,
    chunk,
    plan,
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
