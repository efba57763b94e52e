"""Calls byte by byte, including malformed ones that no client library makes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import itertools
import json
import socket
import time
from collections.abc import Awaitable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

BODY = {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
LIMIT_S = 60  # a test that waits for longer has failed
T = TypeVar("T")


class Answer(NamedTuple):
    """An answer. `events` are the decoded data lines of a stream without the last; `took_s` is the
    time to its end."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float

    @property
    def events(self) -> list[Any]:
        lines = [line for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        return "".join(c["text"] for event in self.events for c in event["choices"])


async def call(port: int, body: dict[str, Any], *, leave_after_bytes: int | None = None) -> Answer:
    """Make one call on a new connection; it may disconnect in the middle of the response."""
    begin_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(body, b"connection: close"))
    try:
        if leave_after_bytes is not None:
            partly = await reader.readexactly(leave_after_bytes)
            return Answer(0, {}, partly, time.monotonic() - begin_s)
        raw = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return Answer(*decoded(raw), time.monotonic() - begin_s)


def decoded(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer, or as much of the body as there is."""
    source = SimpleNamespace(makefile=lambda _: io.BytesIO(raw))
    response = http.client.HTTPResponse(cast(socket.socket, source))
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    try:
        content = response.read()
    except http.client.IncompleteRead as cut:
        content = cut.partial
    return response.status, headers, content


def post(
    body: dict[str, Any] | bytes,
    *headers: bytes,
    num_bytes: int | None = None,
    path: bytes = b"/v1/completions",
) -> bytes:
    """Return the bytes of a call; `num_bytes` is the length that it claims."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = b"content-length: %d" % (len(content) if num_bytes is None else num_bytes)
    lines = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-type: application/json", length]
    return b"\r\n".join([*lines, *headers, b"", content])


async def trickle(port: int, begin: bytes, rest: bytes = b"a") -> bytes:
    """Send the rest slowly, byte by byte, until the server answers. Return all bytes from the
    server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    answer = asyncio.ensure_future(reader.read(2**16))
    for byte in itertools.cycle(rest):
        if (await asyncio.wait({answer}, timeout=0.03))[0]:
            break
        writer.write(bytes([byte]))
    with contextlib.closing(writer):
        return answer.result() + await rest_of(reader)


async def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes; return all that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with contextlib.closing(writer):
        return await rest_of(reader)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    content = b""
    try:
        while part := await reader.read(2**16):
            content += part
    except ConnectionError as error:
        print(f"after {len(content)} bytes: {error!r}")  # shown where a test fails
    return content


async def during_honest_calls(port: int, hostile: Awaitable[Any]) -> Any:
    """Return the result of a hostile client, while other clients are served."""
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
    """Connect a client that does not read; its receive buffer is nearly 0."""
    mute = socket.socket()
    mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    mute.connect(("127.0.0.1", port))
    mute.sendall(sent)
    return mute
