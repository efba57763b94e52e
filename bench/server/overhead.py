"""Processor time of the server itself per chunk of a stream, without an engine.

A stub replaces the engine: at each tick it gives one output to every open stream, as a step would.
The client runs in another process, reads raw sockets and records arrival times; the report includes
the client's processor time. Jitter is how much the server changes the time between two tokens: the
difference between the delays of successive chunks.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import uvicorn

from bench.report import print_report
from bench.server.raw_client import in_subprocess, read_streams
from cbatch.cli.parser import CommandParser
from cbatch.core.request.request import FinishReason, Request
from cbatch.demo import demo_paths
from cbatch.server.http.app import create_app
from cbatch.server.http.connections import ServerConfig
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import ApiRequest
from cbatch.server.serving.admission_queue import AdmissionQueue, Limits
from cbatch.server.serving.open_request import OpenRequest
from cbatch.server.serving.service import EngineService
from cbatch.system.heap import freeze_heap
from cbatch.text import ChatTemplate, load_tokenizer
from cbatch.text.outputs import Choice, Output, Speculation

TICK_S = 0.01  # interval of the stub's outputs: the duration of a short step
LIMIT_US = 60.0  # target for the server's processor time per chunk, in microseconds
SENT_AT = re.compile(rb'" (\d+\.\d{6})"')  # send time of an output, which is its text
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x = 1"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x = 1"}]},
}


class StubService:
    """A stub of `EngineService`: `num_chunks` outputs of `tokens` tokens per request, one every
    `tick_s`."""

    running = ready = True
    num_requests = num_restarts = 0
    stats = None
    limits = Limits()

    def __init__(self, num_chunks: int, tokens: int, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self.queue = AdmissionQueue(self.limits, time.monotonic)
        self._num_chunks, self._ids = num_chunks, tuple(range(100, 100 + tokens))
        self._open: dict[OpenRequest, int] = {}  # remaining outputs
        self._has_open = asyncio.Event()  # set while a stream is open
        self._ticks: asyncio.Task[None] | None = None

    def open(self, model: ServedModel) -> None:
        """Ignore the model; prompts are not read."""

    async def start(self) -> None:
        self._ticks = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()

    async def submit(self, api_request: ApiRequest) -> AsyncIterator[OpenRequest]:
        opened = OpenRequest(self.queue, 1)
        opened.request = Request(
            request_id=api_request.id, prompt=(1, 2, 3), params=api_request.params, seed=1
        )
        self._open[opened] = self._num_chunks
        self._has_open.set()
        yield opened

    async def _tick(self) -> None:
        while True:
            if not self._open:
                self._has_open.clear()
                await self._has_open.wait()
            await asyncio.sleep(self._tick_s)
            for opened, remaining in list(self._open.items()):
                opened.put(self._output(remaining))
                self._open[opened] = remaining - 1
                if remaining == 1:
                    del self._open[opened]

    def _output(self, remaining: int) -> Output:
        choice = None
        if remaining == 1:
            choice = Choice(0, "", (), FinishReason.LENGTH, None, Speculation())
        tokens = len(self._ids)
        text = f" {time.monotonic():.6f}"  # send time, for the client to compute the delay
        return Output("", 0, text, self._ids, tokens - 1, tokens - 1, choice)


class ReadChunks(NamedTuple):
    chunks: int
    cpu_s: float
    delays_s: list[list[float]]  # from the stub's output to the client, by stream


def read(port: int, path: str, num_streams: int) -> ReadChunks:
    """Read all streams to their ends. Call this function in a process of its own."""
    received: list[list[tuple[float, bytes]]] = [[] for _ in range(num_streams)]

    def note(stream: int, content: bytes) -> None:
        received[stream].append((time.monotonic(), content))  # parsed after the run

    began_s = time.process_time()
    chunks = read_streams(port, path, [BODIES[path]] * num_streams, note)
    cpu_s = time.process_time() - began_s
    delays_s = [
        [
            now_s - float(sent)
            for now_s, content in chunks_of_stream
            for sent in SENT_AT.findall(content)
        ]
        for chunks_of_stream in received
    ]
    return ReadChunks(chunks, cpu_s, delays_s)


class Serving(NamedTuple):
    port: int
    cpu_s: Callable[[], float]  # processor seconds that the server's thread has used


@contextmanager
def serving(num_chunks: int, tokens: int, tick_s: float = TICK_S) -> Iterator[Serving]:
    """Run a server over `StubService` in a thread of this process."""
    text = {
        "tokenizer": load_tokenizer(demo_paths()[0]),
        "chat_template": ChatTemplate("{{ messages[0].content }}", {}, "the benchmark"),
    }
    model = ServedModel("x", max_model_len=1024, vocab_size=4096, created_s=0, **text)
    app = create_app(cast(EngineService, StubService(num_chunks, tokens, tick_s)), model)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(ServerConfig(app, ConnectionLimits(), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    try:
        yield Serving(listener.getsockname()[1], lambda: time.clock_gettime(clock))
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def measure(path: str, num_streams: int, num_chunks: int, tokens: int) -> dict[str, Any]:
    """Return a row of the report."""
    with serving(num_chunks, tokens) as (port, cpu_s):
        in_subprocess(read, port, path, 1)  # the first call imports and compiles
        freeze_heap()  # as a server does once it listens
        began_s = cpu_s()
        chunks_read: ReadChunks = in_subprocess(read, port, path, num_streams)
        us = (cpu_s() - began_s) / chunks_read.chunks * 1e6
    # Time that the server adds between two tokens: the difference of successive delays.
    added_s = np.concatenate([np.abs(np.diff(delays)) for delays in chunks_read.delays_s])
    return {
        "path": path,
        "streams": num_streams,
        "tokens_per_chunk": tokens,
        "chunks": chunks_read.chunks,
        "server_us_per_chunk": round(us, 1),
        "of_limit": round(us / LIMIT_US, 3),
        "client_us_per_chunk": round(chunks_read.cpu_s / chunks_read.chunks * 1e6, 1),
        "delay_ms_p50": round(float(np.median(np.concatenate(chunks_read.delays_s))) * 1e3, 3),
        "itl_jitter_ms_p99": round(float(np.percentile(added_s, 99)) * 1e3, 3),
    }


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--chunks", type=int, default=300, help="chunks of each stream")
    parser.add_argument("--one-core", action="store_true", help="run server and client on one core")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [
        measure(path, num_streams, arguments.chunks, tokens)
        for path in BODIES
        for num_streams in arguments.streams
        for tokens in (1, 3)
    ]
    notes = (
        f"a tick every {TICK_S * 1e3:g} ms; the server's time includes the stub's, accepting the "
        "requests and waking up for each tick",
    )
    print_report(
        "server: processor time per chunk", rows, notes=notes, extra={"limit_us": LIMIT_US}
    )


if __name__ == "__main__":
    main()
