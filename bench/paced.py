"""A server whose tokens come at set times: what load testers make of it differs by the testers.

A request's first token is due `FIRST_S` after it was read, every other `GAP_S` after the one before
it was due, whatever the load; a token is a chunk. It answers streamed completions and says its
model, and nothing else.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from bench.load.unpaced import END, HEAD, content_length, event, usage_event

FIRST_S, GAP_S = 0.1, 0.02
MODEL = "paced"
_TOLD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class _Asked(msgspec.Struct):
    max_tokens: int


@contextmanager
def paced_server() -> Iterator[str]:
    """Its URL. In a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection) -> None:
    asyncio.run(_serve(pipe))  # timers of uvloop may ring half a millisecond early


async def _serve(pipe: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(
        _Connection, "127.0.0.1", 0, backlog=1024
    )
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        top, end, body = self._received.partition(b"\r\n\r\n")
        length = content_length(top)
        if not end or len(body) < length:
            return
        self._received = body[length:]
        if top.startswith(b"POST"):
            asked = msgspec.json.decode(body[:length], type=_Asked)
            self._transport.write(HEAD)
            loop = asyncio.get_running_loop()
            self._send(1, asked.max_tokens, loop.time() + FIRST_S)
        else:
            models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            told = msgspec.json.encode(models)
            self._transport.write(_TOLD % (len(told), told))

    def _send(self, number: int, last: int, due_s: float) -> None:
        """Sends the token `number` when it is due, and then those after it."""
        asyncio.get_running_loop().call_at(due_s, self._sent, number, last, due_s)

    def _sent(self, number: int, last: int, due_s: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(event(number, last, MODEL))
        if number < last:
            self._send(number + 1, last, due_s + GAP_S)
        else:
            self._transport.write(usage_event(last, MODEL) + END)
