"""Misused connections: cut, kept open, abandoned, or not read."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.hostile.attacker import (
    HOST,
    HOSTILE_KEY,
    STREAM,
    Target,
    attack,
    head,
    leave_unread,
    whole,
)

NUM_HELD = 100
HOLD_S = 4.0
HALF_BYTES = 2_000_000


@attack("held closed 400 408 413 431")
def half_heads(target: Target) -> None:
    """Send a hundred request heads slowly, byte by byte."""
    with held(target, NUM_HELD) as connections:
        for connection in connections:
            connection.sendall(head()[: target.rng.randrange(60)])
        trickle(target, connections)


@attack("held closed 400 401 408 413 431")
def half_bodies(target: Target) -> None:
    """Send most of a body, and the rest slowly, byte by byte; with and without a key."""
    for key in (HOSTILE_KEY, None):
        with held(target, 8) as connections:
            begun = head(4 * HALF_BYTES, key=key) + b'{"prompt":"' + b"a" * HALF_BYTES
            for connection in connections:
                with suppress(OSError):  # the server need not read a rejected body
                    connection.sendall(begun)
            trickle(target, connections)


@attack("left closed")
def leave(target: Target) -> None:
    """Disconnect in the middle of a body, at once, at the first bytes, or in the middle of a
    stream."""
    for number in range(24):
        began_s = time.monotonic()
        call = STREAM | {"max_tokens": 300, "stream": number % 3 > 0, "n": 1 + number % 2}
        # Otherwise the connection stays open after the response, and a further read waits.
        raw = whole(call).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        is_cut = number % 4 == 0
        with target.open(raw[: target.rng.randrange(1, len(raw))] if is_cut else raw) as connection:
            for _ in range(target.rng.choice([0, 0, 1, 5])):
                if call["stream"] and not is_cut:
                    connection.recv(4096)
            target.note("left", began_s)


@attack("left closed", large=True)
def never_read(target: Target) -> None:
    """Request streams with all details, and do not read them."""
    call = STREAM | {"max_tokens": 900, "n": 4, "logprobs": 20, "return_token_ids": True}
    leave_unread(target, [whole(call)] * 2, HOLD_S)


@attack("200 left closed")
def pipelined(target: Target) -> None:
    """Send twenty calls at once, and wait for the responses or disconnect."""
    raw = whole({"prompt": "x", "max_tokens": 2}) * 20
    for wait_s in (30.0, 0.0):
        began_s = time.monotonic()
        with target.open(raw) as connection:
            if wait_s:
                target.answered(connection, began_s, wait_s)
            else:
                target.note("left", began_s)


@attack("100 200 400 401 404 405 408 413 431 silent closed")
def broken_requests(target: Target) -> None:
    rng, right = target.rng, whole({"prompt": "x", "max_tokens": 1})
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    raws = [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        head(-1),
        head(2**70),
        right.replace(b"Content-Length", b"Content-Length: 3\r\nContent-Length"),
        head()[:-2] + chunked + b"zz\r\n{}\r\n0\r\n\r\n",
        head()[:-2] + chunked + b"ffffffffffffffff\r\n{}\r\n",
        head(5)[:-2] + chunked + b"2\r\n{}\r\n0\r\n\r\nGET /",
        right.replace(b"Host: x", b"X: " + b"a" * 200_000),
        right.replace(b"Host: x", b"X: a\r\n" * 5000),
        right.replace(b"Host: x", b"Expect: 100-continue"),
        right.replace(b"Host: x", b"Upgrade: websocket\r\nConnection: Upgrade"),
        rng.randbytes(5000),
    ]
    for raw in rng.sample(raws, 8):
        began_s = time.monotonic()
        with target.open(raw) as connection:
            target.answered(connection, began_s, wait_s=1.0)


@contextmanager
def held(target: Target, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        address = (HOST, target.port)
        yield [stack.enter_context(socket.create_connection(address, 30)) for _ in range(count)]


def trickle(target: Target, connections: list[socket.socket]) -> None:
    """Send bytes to the connections one by one, then record the outcomes."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + HOLD_S:
        for connection in connections:
            with suppress(OSError):
                connection.send(b"a")
        time.sleep(0.5)
    for connection in connections:
        try:
            target.answered(connection, began_s, wait_s=0.0)
        except OSError:
            target.note("closed", began_s)
