"""Servers with engine processes, and clients to load them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cbatch.kv_events.publisher import KVEventPublisher
from cbatch.process.client import EngineClient
from cbatch.process.server import EngineProcess, Factory
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.service import EngineService
from cbatch.text import TextTokenizer
from tests.server.http_client import Client, serving_service
from tests.server.sim_server import Settings
from tests.toy_engine import TOKENIZER

ROOT = Path(__file__).parent.parent.parent


class Served(NamedTuple):
    client: Client
    service: EngineService
    engine: EngineClient


@contextmanager
def serving_process(
    factory: Factory,
    limits: Limits | None = None,
    tokenizer: TextTokenizer = TOKENIZER,
    kv_events: KVEventPublisher | None = None,
) -> Iterator[Served]:
    """Serve HTTP in a thread, so that the test can inspect the server, with the engine in a
    process."""
    engine = EngineClient(partial(EngineProcess, factory))
    service = EngineService(engine, tokenizer, limits=limits, kv_events=kv_events)
    with serving_service(service, tokenizer) as client:
        yield Served(client, service, engine)


@contextmanager
def server_process(settings: Settings) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """Run `tests.server.sim_server` in a process of its own, as an operator does."""
    command = [sys.executable, "-m", "tests.server.sim_server", msgspec.json.encode(settings)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Client(int(process.stdout.readline()))
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)


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
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        if leave_after_bytes is not None:
            partly = b""
            if leave_after_bytes:
                partly = await reader.readexactly(leave_after_bytes)
            return Answer(0, {}, partly, time.monotonic() - begin_s)
        raw = await reader.read()
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    took_s = time.monotonic() - begin_s
    top, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = b"".join(_chunks(rest))
    return Answer(int(status.split()[1]), headers, rest, took_s)


def _chunks(raw: bytes) -> Iterator[bytes]:
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        yield raw[:length]
        raw = raw[length + 2 :]
