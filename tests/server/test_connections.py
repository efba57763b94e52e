"""Slow clients, many clients, and malformed requests: they delay no other client and leave no
resources."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.engine.engine import Engine
from cbatch.server.http import app as app_module
from cbatch.server.http.connections import MAX_HEAD_BYTES, MAX_PIPELINED
from cbatch.server.http.handler import PARSED, BodyIntake
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.serving.admission_queue import FREE_BYTES, Limits, MemoryBudget
from tests.server.engines import ROOMY
from tests.server.http_client import Client, sample, serving, wait_until
from tests.server.raw_calls import (
    BODY,
    call,
    deaf,
    during_honest_calls,
    exchange,
    post,
    rest_of,
    run,
    statuses,
    trickle,
)
from tests.toy_engine import make_engine

SHORT = ConnectionLimits(request_timeout_s=0.3)
LONG = {"prompt": "def add(a, b):", "max_tokens": 8000, "stream": True}
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
REFUSALS = "vllm:admission_rejections_total"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    limits = Limits(max_unread_tokens=10**6)
    with serving(make_engine(**ROOMY), limits, connections=SHORT) as client:
        yield client


def answered(client: Client, key: str = "a") -> bool:
    with client.open(BODY, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status == 200


# ---- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begin",
    [b"GET /", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: b", post(BODY, num_bytes=10**6)],
    ids=["line", "head", "body"],
)
def test_a_slow_request_is_ended_with_a_status(client: Client, begin: bytes) -> None:
    answers = run(during_honest_calls(client.port, trickle(client.port, begin)))
    assert statuses(answers) == [408]
    head, _, body = answers.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"took longer than 0.3 s" in body
    assert json.loads(body)["error"]["message"]
    wait_until(lambda: client.num_connections == 0)


@pytest.mark.parametrize(
    ("sent", "more"), [(b"", b""), (b"", b"\r\n"), (GET, b"\r\n")], ids=["silent", "new", "used"]
)
def test_a_connection_without_a_request_is_closed(client: Client, sent: bytes, more: bytes) -> None:
    """Line ends alone do not keep it open. There is no response, since there is no request."""

    async def scene() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(sent)
        if sent:
            assert b"200 OK" in await reader.readuntil(b"}")
        reply = asyncio.ensure_future(reader.read())
        while not (await asyncio.wait({reply}, timeout=0.03))[0]:
            writer.write(more)
        writer.close()
        # A line that comes after the end makes it a reset.
        return b"" if isinstance(reply.exception(), ConnectionResetError) else reply.result()

    assert run(during_honest_calls(client.port, scene())) == b""


def test_a_partial_pipelined_request_does_not_end_the_answer_before_it(client: Client) -> None:
    """The time limit of a partial pipelined request begins after the response to the one before
    it."""
    stream = post(LONG | {"seed": 1, "max_tokens": 3000})
    answers = run(during_honest_calls(client.port, exchange(client.port, stream + GET[:9])))
    assert statuses(answers) == [200, 408]
    assert b"data: [DONE]\n\n" in answers and answers.count(b"data: ") > 500


def test_a_rejected_call_is_not_read_and_a_slow_body_frees_its_keys_place() -> None:
    keys = KeyRing(["a"], max_requests_per_key=1)

    async def scene(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(post(BODY, num_bytes=10**6))
        assert b"401" in await reader.readuntil(b"}}")
        while client.num_connections:
            writer.write(b"a")
            await asyncio.sleep(0.03)
        writer.close()
        begin = post(BODY, b"authorization: Bearer a", num_bytes=10**6)
        assert statuses(await trickle(client.port, begin)) == [408]

    with serving(make_engine(), keys=keys, connections=SHORT) as client:
        run(scene(client))
        assert answered(client)
        assert statuses(run(expecting(client))) == [401], "before the body"


# ---- answers that no client reads ----------------------------------------------------------------

TEXT = {"prompt": "ab" * 700_000, "return_token_strs": True}
DEAF = {
    "stream": post(LONG | {"n": 8, "return_token_ids": True}),
    "whole": post(TEXT, path=b"/tokenize"),
    "last": post(TEXT, b"connection: close", path=b"/tokenize"),
}
# A context for answers longer than the system's send buffers.
LONG_CONTEXT = {"max_model_len": 2**19, "num_blocks": 8192}


def test_a_client_that_does_not_read_is_disconnected() -> None:
    """Its request has already ended: it was aborted as unread, or it was complete."""
    engine = make_engine(**LONG_CONTEXT)
    with serving(engine, connections=SHORT) as client:
        for sent in DEAF.values():
            with deaf(client.port, sent):
                wait_until(lambda: client.num_connections == 1)
                assert run(call(client.port, BODY)).status == 200
                wait_until(lambda: client.num_connections == 0)
                wait_until(lambda: engine.scheduler.num_running == 0)


def test_a_client_that_reads_slowly_stays_connected() -> None:
    """It reads for longer than `request_timeout_s`, and most of the response is unread during that
    time."""
    limits = ConnectionLimits(request_timeout_s=0.5)
    with serving(make_engine(**LONG_CONTEXT), connections=limits) as client:
        content = b""
        with deaf(client.port, DEAF["last"], 2**16) as slow:
            while part := slow.recv(2**16):
                content += part
                time.sleep(0.03)
    head, _, body = content.partition(b"\r\n\r\n")
    assert statuses(head) == [200] and b"content-length: %d\r\n" % len(body) in head


# ---- sizes and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [GET[:-4] + b"\r\nx: ", *[b"a" * 2**14] * 64],
        [GET[:-2], *[b"x: a\r\n" * 2**12] * 64],
        [GET[:-4] + b"\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"],
        [GET[:-4] + b"\r\nx: ", *[b"a" * (2**14 - 9)] * 8, b"a" * 99 + b"\r\ny: b\r\n"],
    ],
    ids=["value", "fields", "whole", "end"],
)
def test_a_head_without_an_end_is_rejected(
    client: Client, parts: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        reply = asyncio.ensure_future(reader.read(2**16))
        for part in parts:
            writer.write(part)
            if (await asyncio.wait({reply}, timeout=0.002))[0]:
                break
        await asyncio.wait({reply})
        writer.close()
        return reply.result()

    answers = run(during_honest_calls(client.port, scene()))
    assert statuses(answers) == [431] and b"more than 65536 bytes" in answers
    assert not [each for each in caplog.records if each.levelname == "ERROR"]  # refused once
    long = LAST[:-4] + b"\r\nx: " + b"a" * (MAX_HEAD_BYTES - 999) + b"\r\n\r\n"
    assert statuses(run(exchange(client.port, long))) == [200]


def test_connections_are_limited() -> None:
    """Connections beyond the limit are rejected at once; open connections continue."""
    limits = ConnectionLimits(max_connections=4)

    async def scene(client: Client) -> None:
        async with contextlib.AsyncExitStack() as stack:
            connections = []
            for _ in range(4):
                reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
                stack.callback(writer.close)
                connections.append((reader, writer))
            while client.num_connections < 4:
                await asyncio.sleep(0.005)
            for _ in range(20):
                answers = await exchange(client.port, b"")
                assert statuses(answers) == [503] and b"retry-after: 1\r\n" in answers
            for _ in range(20):  # it sends everything before it reads
                assert (await call(client.port, BODY)).status == 503
            for reader, writer in connections:
                writer.write(GET)
                assert b"200 OK" in await reader.readuntil(b"}")
        while client.num_connections:
            await asyncio.sleep(0.005)
        assert (await call(client.port, BODY)).status == 200

    with serving(make_engine(), connections=limits) as client:
        run(scene(client))
        assert sample(client, REFUSALS, reason="connections") == 40


def test_bodies_share_a_memory_limit_that_short_bodies_never_reach() -> None:
    limits = ConnectionLimits(max_held_bytes=PARSED * 2**18)
    half = post(b" " * (2**17 + FREE_BYTES // PARSED - 1), num_bytes=2**20)
    large = json.dumps(BODY).encode() + b" " * 2**17
    with watched() as budgets, serving(make_engine(), connections=limits) as client:
        memory = budgets[0]
        with contextlib.ExitStack() as stack:
            first, second = (stack.enter_context(deaf(client.port, half)) for _ in range(2))
            wait_until(lambda: memory.num_bytes >= 2 * PARSED * (2**17 - 1))
            status, _, headers = client.post(large)
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert client.post(BODY)[0] == 200, "a short one"
            first.close()
            wait_until(lambda: memory.num_bytes <= PARSED * 2**17)
            assert client.post(large)[0] == 200
            second.close()
        wait_until(lambda: not memory.num_bytes)
        assert sample(client, REFUSALS, reason="call_bytes") == 1


@contextlib.contextmanager
def watched() -> Iterator[list[MemoryBudget]]:
    """Yield the budgets of the applications that are created in the block."""
    made: list[MemoryBudget] = []

    def make(*args: Any) -> BodyIntake:
        intake = BodyIntake(*args)
        made.append(intake.memory)
        return intake

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "BodyIntake", make)
        yield made


# ---- malformed requests --------------------------------------------------------------------------


def test_pipelined_requests() -> None:
    pipelined = post(LONG | {"max_tokens": 2000}) + GET * (MAX_PIPELINED - 1) + LAST
    with serving(make_engine(**ROOMY)) as client:
        assert statuses(run(exchange(client.port, pipelined))) == [200] * (MAX_PIPELINED + 1)
        answers = run(exchange(client.port, post(LONG) + GET * 999))
    assert statuses(answers) in ([], [200]) and b"[DONE]" not in answers, "not all of them are kept"


async def expecting(client: Client) -> bytes:
    """Send a body after the first response, and return all responses."""
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(post(b"", b"expect: 100-continue", b"connection: close", num_bytes=len(body)))
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(body)
    with contextlib.closing(writer):
        return head + await rest_of(reader)


def test_a_client_that_expects_100_continue(client: Client) -> None:
    assert statuses(run(expecting(client))) == [100, 200]


KEY = b"authorization: Bearer a"
CHUNKED = b"transfer-encoding: chunked"
LEFT = {
    "half a head": post(BODY, KEY)[:50],
    "half a body": post(BODY, KEY, num_bytes=10**6),
    "half a chunk": post(BODY, KEY, CHUNKED).replace(b"content-length: ", b"x: ") + b"\r\n",
    "body longer than it says": post(BODY, KEY) + b"}}}}\r\n\r\n",
    "length and chunks": post(BODY, KEY, CHUNKED),
    "stream": post(LONG, KEY),
    "stream and another": post(LONG, KEY) + post(BODY, KEY),
    "stream and what is none": post(LONG, KEY) + b"\x00\x01\x02 none\r\n\r\n",
    "whole answer": post(LONG | {"stream": False}, KEY),
    "asks before it sends": post(b"", KEY, b"expect: 100-continue", num_bytes=99),
    "upgrade": post(BODY, KEY, b"connection: upgrade", b"upgrade: websocket"),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Client, Engine, MemoryBudget]]:
    """Return a server with one key, which may have one call open."""
    engine, keys = make_engine(**ROOMY), KeyRing(["a"], max_requests_per_key=1)
    with watched() as budgets, serving(engine, keys=keys) as client:
        yield client, engine, budgets[0]


@pytest.mark.parametrize("what", LEFT)
def test_an_aborted_call_leaves_no_resources(
    guarded: tuple[Client, Engine, MemoryBudget], what: str
) -> None:
    """No connection, open call of the key, counted byte of a body, queue place or slot remains."""
    client, engine, memory = guarded
    for how in ("leaves", "resets", "half-closes"):
        for pause_s in (0, 0.02):  # before the server reads the call, or after it
            with socket.create_connection(("127.0.0.1", client.port)) as left:
                left.sendall(LEFT[what])
                time.sleep(pause_s)
                break_off(left, how)
        wait_until(lambda: client.num_connections == memory.num_bytes == 0)
        wait_until(lambda: not engine.scheduler.num_running + engine.scheduler.num_waiting)
        wait_until(lambda: answered(client))


def break_off(left: socket.socket, how: str) -> None:
    """Send part of a call; the caller closes the connection."""
    if how == "resets":
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "half-closes":
        left.settimeout(30)
        with contextlib.suppress(ConnectionError):
            left.shutdown(socket.SHUT_WR)
            while left.recv(2**16):
                pass
