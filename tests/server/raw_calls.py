"""Calls by hand, byte by byte, as no client of good manners makes them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from tests.server.processes import call

BODY = {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
LIMIT_S = 60  # a test that waits for longer has failed
T = TypeVar("T")


def post(
    body: dict[str, Any] | bytes,
    *headers: bytes,
    num_bytes: int | None = None,
    path: bytes = b"/v1/completions",
) -> bytes:
    """A call as it goes over the wire; `num_bytes` is what it says of its length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = b"content-length: %d" % (len(content) if num_bytes is None else num_bytes)
    lines = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-type: application/json", length]
    return b"\r\n".join([*lines, *headers, b"", content])


async def trickle(port: int, begin: bytes, rest: bytes = b"a") -> bytes:
    """Sends a byte of the rest now and then, for ever, until the server says something: that, to
    the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    told = asyncio.ensure_future(reader.read(2**16))
    for byte in itertools.cycle(rest):
        if (await asyncio.wait({told}, timeout=0.03))[0]:
            break
        writer.write(bytes([byte]))
    with contextlib.closing(writer):
        return told.result() + await rest_of(reader)


async def exchange(port: int, sent: bytes) -> bytes:
    """Everything that is answered, to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with contextlib.closing(writer):
        return await rest_of(reader)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    told = b""
    try:
        while part := await reader.read(2**16):
            told += part
    except ConnectionError as error:
        print(f"after {len(told)} bytes: {error!r}")  # shown where a test fails
    return told


async def beside_honest(port: int, hostile: Awaitable[Any]) -> Any:
    """What the hostile one comes to, while others are served."""
    task = asyncio.ensure_future(hostile)
    answers = [await call(port, BODY)]
    while not task.done():
        answers.append(await call(port, BODY))
    assert {answer.status for answer in answers} == {200}
    return await task


def run(scene: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scene, LIMIT_S))


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


def deaf(port: int, sent: bytes, buffer_bytes: int = 2048) -> socket.socket:
    """A client that asks and does not read; little more than its buffer is taken in for it."""
    mute = socket.socket()
    mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    mute.connect(("127.0.0.1", port))
    mute.sendall(sent)
    return mute
