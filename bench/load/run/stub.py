"""A server of completions whose tokens come at set times, whatever the load, or as fast as they are
read: one write a chunk, all streams in turn. It says its model, and nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec

from bench.load.client.http import Endpoint
from bench.load.run.processes import loop_of

MODEL, PROMPT_TOKENS = "stub", 128
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOLD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class Pace(NamedTuple):
    """A request's first token is due `first_s` after it was read, every other `gap_s` after the one
    before it was due."""

    first_s: float = 0.1
    gap_s: float = 0.02


class _Asked(msgspec.Struct):
    max_tokens: int


@contextmanager
def stub_server(pace: Pace | None = None) -> Iterator[Endpoint]:
    """In a process of its own; without a pace as fast as it is read."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, pace), daemon=True)
    process.start()
    try:
        yield Endpoint("127.0.0.1", mine.recv(), False, "")
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, pace: Pace | None) -> None:
    # Timers of uvloop may ring half a millisecond early.
    (loop_of() if pace is None else asyncio.run)(_serve(pipe, pace))


async def _serve(pipe: Connection, pace: Pace | None) -> None:
    server = await asyncio.start_server(partial(_answer, pace), "127.0.0.1", 0, backlog=1024)
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


async def _answer(
    pace: Pace | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request after another, of a connection."""
    clock = asyncio.get_running_loop().time
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            began_s, length = clock(), _LENGTH.search(head)
            if length is None:  # what else there is to ask for
                models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
                told = msgspec.json.encode(models)
                writer.write(_TOLD % (len(told), told))
                continue
            asked = msgspec.json.decode(await reader.readexactly(int(length[1])), type=_Asked)
            writer.write(_HEAD)
            for number, chunk in enumerate(answer_of(asked.max_tokens)):
                due_s = 0.0 if pace is None else began_s + pace.first_s + number * pace.gap_s
                await asyncio.sleep(max(due_s - clock(), 0.0))
                writer.write(chunk)
                await writer.drain()
