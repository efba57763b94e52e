"""`cbatch bench --self-test`: chunks that the client can process per second of processor time, from
a stub server that sends as fast as the client reads."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from bench.load.client.bodies import BodySettings, Item
from bench.load.client.http import Endpoint
from bench.load.run.drive import PartPlan, event_loop_runner, run_parts, split
from bench.report import print_report
from sim.workload.traces.request import TraceRequest

NEEDED_PER_S = 50_000  # chunks per second that a core should process.
STREAMS = (64, 256)  # concurrent calls.
CHUNKS, ROUNDS = 200, 6  # chunks per call, and calls per stream
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def self_test(processes: int = 1) -> int:
    """Print a row for each number of streams. Returns 1 if the client is too slow, else 0."""
    with stub_server() as endpoint:
        rows = [event_loop_runner()(measure_client(endpoint, each, processes)) for each in STREAMS]
    notes = (
        "chunks of 280 bytes, each decoded; per core: over the client's own processor time",
        f"one process should take {NEEDED_PER_S:,} a second",
    )
    print_report("the client, against an unpaced server", rows, notes=notes)
    return int(any(row["of_needed"] < 1 for row in rows))


async def measure_client(
    endpoint: Endpoint, streams: int, processes: int = 1, rounds: int = ROUNDS
) -> dict[str, Any]:
    count = streams * rounds
    request = TraceRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=CHUNKS)
    items = (Item(prompt="x"),)
    plan = PartPlan(
        endpoint=endpoint,
        bodies=BodySettings(model="stub", chat=False, streamed=True, fields={}, items=items),
        requests=(request,) * count,
        indices=tuple(range(count)),
        total=count,
        concurrency=streams,
    )
    parts = await run_parts(split(plan, processes), stop=asyncio.Event())
    calls = [call for part in parts for call in part.calls]
    chunks = sum(call.chunks for call in calls)
    per_s = chunks / sum(part.cpu_s for part in parts)
    return {
        "streams": streams,
        "processes": processes,
        "chunks": chunks,
        "failed": sum(call.error is not None for call in calls),
        "chunks_per_s": round(chunks / max(part.elapsed_s for part in parts)),
        "chunks_per_s_per_core": round(per_s),
        "us_per_chunk": round(1e6 / per_s, 2),
        "of_needed": round(per_s / NEEDED_PER_S, 3),
    }


@contextmanager
def stub_server() -> Iterator[Endpoint]:
    """Run a completions server in another process. It writes a chunk at a time to each stream in
    turn, as fast as the client reads."""
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=_serve, args=(child_pipe,), daemon=True)
    process.start()
    try:
        yield Endpoint("127.0.0.1", pipe.recv(), False, "")
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    chunks = _chunks()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
                await reader.readexactly(int(length))
                writer.write(_HEAD)
                for chunk in chunks:
                    await asyncio.sleep(0)  # let the other streams write
                    writer.write(chunk)
                    await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    event_loop_runner()(serve())


def _chunks() -> list[bytes]:
    """Return cbatch's response with `CHUNKS` tokens as HTTP chunks, an event each. The last chunk
    also has [DONE]."""
    common = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1, "model": "stub"}
    choice: dict[str, Any] = {"index": 0, "text": " and so on", "seed": 1, "logprobs": None}
    chunks: list[bytes] = []
    for number in range(1, CHUNKS + 1):
        usage = {"prompt_tokens": 128, "completion_tokens": number, "total_tokens": 128 + number}
        choice["finish_reason"] = "length" if number == CHUNKS else None
        data = msgspec.json.encode(common | {"choices": [choice], "usage": usage})
        chunks.append(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))
    chunks[-1] += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    return chunks
