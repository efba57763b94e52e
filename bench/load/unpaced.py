"""A server that sends as fast as it is read: one write a chunk, all streams in turn."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from bench.load.processes import loop_of

PROMPT_TOKENS = 128
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def serve(pipe: Connection, chunks: int) -> None:
    """Tells its port; every call is answered with so many chunks. Until it is killed."""
    loop_of()(_serve(pipe, chunks))


def answer_of(chunks: int) -> list[bytes]:
    """What cbatch sends for a completion, one HTTP chunk an event."""
    events = [event(number, chunks) for number in range(1, chunks + 1)]
    events[0] = HEAD + events[0]
    return [*events, END]


def event(number: int, last: int, model: str = "unpaced") -> bytes:
    """Of the token `number` of `last`, from 1."""
    choice = {"index": 0, "text": " and so on", "seed": 1, "logprobs": None}
    choice["finish_reason"] = "length" if number == last else None
    return _framed_event([choice], number, model)


def usage_event(last: int, model: str) -> bytes:
    """What ends a stream whose usage was asked for."""
    return _framed_event([], last, model)


def _framed_event(choices: list[dict[str, Any]], tokens: int, model: str) -> bytes:
    told = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1, "model": model}
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }
    body = msgspec.json.encode(told | {"choices": choices, "usage": usage})
    return _framed(b"data: " + body + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Stream(asyncio.Protocol):
    def __init__(self, streams: dict[_Stream, int]) -> None:
        self._streams = streams
        self._transport: Any = None
        self._head = b""
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._head += data
        top, end, body = self._head.partition(b"\r\n\r\n")
        if end and len(body) >= content_length(top):
            self._head = b""
            self._streams[self] = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def write(self, answer: list[bytes]) -> None:
        if self._paused:
            return
        at = self._streams[self]
        self._transport.write(answer[at])
        if at + 1 < len(answer):
            self._streams[self] = at + 1
        else:
            del self._streams[self]


def content_length(top: bytes) -> int:
    for line in top.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _serve(pipe: Connection, chunks: int) -> None:
    answer, streams = answer_of(chunks), dict[_Stream, int]()
    server = await asyncio.get_running_loop().create_server(
        lambda: _Stream(streams), "127.0.0.1", 0, backlog=1024
    )
    pipe.send(server.sockets[0].getsockname()[1])
    while True:
        for stream in list(streams):
            if stream in streams:
                stream.write(answer)
        await asyncio.sleep(0 if streams else 0.001)
