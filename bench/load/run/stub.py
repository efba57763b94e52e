"""A server of completions whose tokens come as fast as they are read: one write a chunk, all
streams in turn."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection

import msgspec

from bench.load.client.http import Endpoint
from bench.load.run.processes import loop_of

MODEL, PROMPT_TOKENS = "stub", 128
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class _Asked(msgspec.Struct):
    max_tokens: int


@contextmanager
def stub_server() -> Iterator[Endpoint]:
    """In a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    try:
        yield Endpoint("127.0.0.1", mine.recv(), False, "")
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection) -> None:
    loop_of()(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


@cache
def answer_of(tokens: int) -> list[bytes]:
    """What cbatch sends for a completion: an event for each token, one HTTP chunk each; the usage
    that ends a stream comes with the last."""
    told = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1, "model": MODEL}
    events: list[bytes] = []
    for number in (*range(1, tokens + 1), tokens):
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": number}
        usage["total_tokens"] = PROMPT_TOKENS + number
        choice = {"index": 0, "text": " and so on", "seed": 1, "logprobs": None}
        choice["finish_reason"] = "length" if number == tokens else None
        choices = [choice] if len(events) < tokens else []
        data = msgspec.json.encode(told | {"choices": choices, "usage": usage})
        events.append(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))
    last = b"".join((*events[-2:], b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"))
    return [*events[:-2], last]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request after another, of a connection."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            length = _LENGTH.search(await reader.readuntil(b"\r\n\r\n"))
            assert length is not None
            asked = msgspec.json.decode(await reader.readexactly(int(length[1])), type=_Asked)
            writer.write(_HEAD)
            for chunk in answer_of(asked.max_tokens):
                await asyncio.sleep(0)  # the others' turn
                writer.write(chunk)
                await writer.drain()
