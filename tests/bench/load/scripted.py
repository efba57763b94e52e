"""A server that answers by a test's script, on a real socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.load.client.bodies import BodySettings, Item
from bench.load.client.http import Endpoint, TimedCall
from bench.load.run.drive import Part, PartPlan, drive
from sim.workload.traces.request import TraceRequest

Script = Callable[["Exchange"], Awaitable[None]]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
DONE = b"data: [DONE]\n\n"


class Exchange:
    """One request. `number` counts them over all connections, `place` on this one, both from 0."""

    def __init__(
        self, body: dict[str, Any], number: int, place: int, writer: asyncio.StreamWriter
    ) -> None:
        self.body, self.number, self.place, self._writer = body, number, place, writer

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def begin(self) -> None:
        await self.send(STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")

    async def event(self, data: bytes) -> None:
        """Send an event as a chunk of HTTP; an empty one ends the answer."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def whole(self, body: bytes, status: str = "200 OK", length: int | None = None) -> None:
        size = len(body) if length is None else length
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
        await self.send(head.encode() + b"\r\n" + body)

    def close(self) -> None:
        self._writer.close()


class Scripted:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    ready = threading.Event()
    served: list[Scripted] = []
    enough: list[Callable[[], object]] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        served[0].connections += 1
        place = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head.lower())
                body = json.loads(await reader.readexactly(int(length[1])) if length else b"{}")
                served[0].bodies.append(body)
                await script(Exchange(body, len(served[0].bodies) - 1, place, writer))
                place += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    async def main() -> None:
        over = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        served.append(Scripted(Endpoint("127.0.0.1", port, False, "")))
        enough.append(partial(asyncio.get_running_loop().call_soon_threadsafe, over.set))
        ready.set()
        await over.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield served[0]
    finally:
        enough[0]()
        thread.join(10)
    assert not thread.is_alive()


def chunk(text: str, tokens: int | None, *, reason: str | None = None, prompt: int = 5) -> bytes:
    """Return an event of a completion; `tokens` is the usage so far."""
    data: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    if tokens is not None:
        data["usage"] = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def usage(tokens: int, prompt: int = 5) -> bytes:
    data = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def answer_well(exchange: Exchange, tokens: int = 3) -> None:
    await exchange.begin()
    for count in range(1, tokens + 1):
        await exchange.event(chunk("a", count, reason="length" if count == tokens else None))
    await exchange.event(usage(tokens) + DONE)
    await exchange.event(b"")


def plan(
    endpoint: Endpoint,
    *,
    arrivals_s: list[float] | None = None,
    count: int = 1,
    concurrency: int | None = 1,
    streamed: bool = True,
    timeout_s: float = 30.0,
    **more: Any,
) -> PartPlan:
    """Return a plan of `count` calls of a closed loop, or of calls at given times."""
    times_s = [0.0] * count if arrivals_s is None else arrivals_s
    requests = [TraceRequest(arrival_s=at, prompt_tokens=5, output_tokens=3) for at in times_s]
    items = (Item(prompt="x"),)
    return PartPlan(
        endpoint=endpoint,
        bodies=BodySettings(model="m", chat=False, streamed=streamed, fields={}, items=items),
        requests=tuple(requests),
        indices=tuple(range(len(requests))),
        total=len(requests),
        concurrency=None if arrivals_s is not None else concurrency,
        timeout_s=timeout_s,
        **more,
    )


def run_plan(made: PartPlan) -> Part:
    async def run() -> Part:
        return await drive(made, start_s=time.monotonic(), stop=asyncio.Event())

    return asyncio.run(run())


def calls_of(made: PartPlan) -> list[TimedCall]:
    return sorted(run_plan(made).calls, key=lambda call: call.index)
