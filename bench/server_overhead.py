"""What the server itself costs: processor time per chunk of a stream, without any engine.

A stub in the engine's place hands one output to every open stream at each tick, as a step does. The
client is a process of its own that reads raw sockets; its processor time is reported beside. In a
second run it notes how long each chunk took to it: what differs from one to the next is the jitter
that the server adds to the time between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import uvicorn

from bench.report import print_report
from cbatch.core.request import FinishReason, SamplingParams
from cbatch.outputs import Accepted, Choice, Output, Speculation
from cbatch.server.admission import Admission, Limits
from cbatch.server.app import create_app
from cbatch.server.model import ServedModel
from cbatch.server.service import EngineService
from cbatch.server.stream import OutputStream
from cbatch.text import ChatTemplate, load_tokenizer

TICK_S = 0.01
LIMIT_US = 60.0
PUT = re.compile(rb'" (\d+\.\d{6})"')
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x = 1"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x = 1"}]},
}


class Ticking:
    """In the place of an `EngineService`: `num_chunks` outputs of `tokens` tokens per request, one
    each `tick_s`."""

    running = ready = True
    num_requests = num_restarts = 0
    stats = None

    def __init__(self, num_chunks: int, tokens: int, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self.queue = Admission(Limits(), time.monotonic)
        self._num_chunks, self._ids = num_chunks, tuple(range(100, 100 + tokens))
        self._open: dict[str, tuple[OutputStream, int]] = {}
        self._some = asyncio.Event()  # is open
        self._ticks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._ticks = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()

    async def submit(
        self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any
    ) -> OutputStream:
        accepted = Accepted(request_id, (1, 2, 3), 1, 1)
        stream = OutputStream(accepted, lambda: None)
        self._open[request_id] = (stream, self._num_chunks)
        self._some.set()
        return stream

    async def _tick(self) -> None:
        while True:
            if not self._open:
                self._some.clear()
                await self._some.wait()
            await asyncio.sleep(self._tick_s)
            for request_id, (stream, left) in list(self._open.items()):
                stream.put(self._output(request_id, left))
                self._open[request_id] = (stream, left - 1)
                if left == 1:
                    del self._open[request_id]

    def _output(self, request_id: str, left: int) -> Output:
        ended = Choice(0, "", (), FinishReason.LENGTH, None, Speculation()) if left == 1 else None
        tokens = len(self._ids)
        text = (
            f" {time.monotonic():.6f}"  # of this machine, so the client can tell how long it took
        )
        return Output(request_id, 0, text, self._ids, tokens - 1, tokens - 1, ended)


def read_streams(port: int, path: str, num_streams: int, answer: Any) -> None:
    """In a process of its own: sends (chunks, processor seconds) when every stream has ended."""
    began_s = time.process_time()
    answer.send((count_chunks(port, path, num_streams), time.process_time() - began_s))


def read_delays(port: int, path: str, num_streams: int, answer: Any) -> None:
    """The same, but sends the seconds from the stub to the client of every chunk, by stream."""
    delays: dict[int, list[float]] = {}

    def note(stream: int, received: bytes) -> None:
        now_s = time.monotonic()
        found = delays.setdefault(stream, [])
        found.extend(now_s - float(put) for put in PUT.findall(received))

    count_chunks(port, path, num_streams, note)
    answer.send(list(delays.values()))


def count_chunks(
    port: int, path: str, num_streams: int, note: Callable[[int, bytes], None] | None = None
) -> int:
    """Opens the streams and reads all to their ends; `note` is given whatever comes."""
    raw = json.dumps(BODIES[path] | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + raw)
        selector.register(connection, selectors.EVENT_READ)
    chunks = 0
    while selector.get_map():
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            received = connection.recv(65536)
            chunks += received.count(b"data: {")
            if note is not None:
                note(key.fd, received)
            if not received:
                selector.unregister(connection)
                connection.close()
    selector.close()
    return chunks


@contextmanager
def serving(num_chunks: int, tokens: int, tick_s: float = TICK_S) -> Iterator[int]:
    """The port of a server over `Ticking`, in a thread of this process."""
    tokenizer = load_tokenizer(_demo())
    template = ChatTemplate("{{ messages[0].content }}", {}, "the benchmark")
    model = ServedModel(
        "x", max_model_tokens=1024, created_s=0, tokenizer=tokenizer, chat_template=template
    )
    app = create_app(cast(EngineService, Ticking(num_chunks, tokens, tick_s)), model)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def measure(path: str, num_streams: int, num_chunks: int, tokens: int) -> dict[str, Any]:
    """One row of the report."""
    with serving(num_chunks, tokens) as port:
        _elsewhere(read_streams, port, path, 1)  # the first call imports and compiles
        began_s = _cpu_s()
        chunks, client_s = _elsewhere(read_streams, port, path, num_streams)
        server_s = _cpu_s() - began_s
        by_stream = _elsewhere(read_delays, port, path, num_streams)
    # What the server adds to the time between two tokens: one delay less the one before.
    added_s = np.concatenate([np.abs(np.diff(delays)) for delays in by_stream])
    us = server_s / chunks * 1e6
    return {
        "path": path,
        "streams": num_streams,
        "tokens_per_chunk": tokens,
        "chunks": chunks,
        "server_us_per_chunk": round(us, 1),
        "of_limit": round(us / LIMIT_US, 3),
        "client_us_per_chunk": round(client_s / chunks * 1e6, 1),
        "delay_ms_p50": round(float(np.median(np.concatenate(by_stream))) * 1e3, 3),
        "itl_jitter_ms_p99": round(float(np.percentile(added_s, 99)) * 1e3, 3),
    }


def _elsewhere(read: Callable[..., None], port: int, path: str, num_streams: int) -> Any:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    client = context.Process(target=read, args=(port, path, num_streams, theirs))
    client.start()
    found = mine.recv()
    client.join()
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _demo() -> str:
    from cbatch.demo import demo_paths

    return str(demo_paths()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--chunks", type=int, default=300, help="of each stream")
    parser.add_argument("--one-core", action="store_true", help="for server and client together")
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
        "calls and waking up for each tick",
    )
    print_report(
        "server: processor time per chunk", rows, notes=notes, extra={"limit_us": LIMIT_US}
    )


if __name__ == "__main__":
    main()
