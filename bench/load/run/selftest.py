"""What the client itself can take: chunks per second of its processor time, from a server that
sends as fast as it is read."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.load.client.bodies import BodySettings, Item
from bench.load.client.http import Endpoint
from bench.load.run.drive import PartPlan
from bench.load.run.processes import loop_of, run_parts, split
from bench.load.run.stub import MODEL, stub_server
from bench.report import print_report
from sim.traces.request import TraceRequest

NEEDED_PER_S = 50_000  # chunks of one core
STREAMS = (64, 256)
CHUNKS, ROUNDS = 200, 6  # of a call; calls of each stream


def self_test(processes: int = 1) -> int:
    """Prints a row for each number of streams; 1 if the client is slower than it should be."""
    with stub_server() as endpoint:
        rows = [loop_of()(measure_client(endpoint, each, processes)) for each in STREAMS]
    notes = (
        "chunks of 280 bytes, each decoded; per core: over the client's own processor time",
        f"one process should take {NEEDED_PER_S:,} a second",
    )
    print_report("the client, against an unpaced server", rows, notes=notes)
    return int(any(row["of_needed"] < 1 for row in rows))


async def measure_client(
    endpoint: Endpoint, streams: int, processes: int = 1, rounds: int = ROUNDS
) -> dict[str, Any]:
    plan = plan_of(endpoint, streams, rounds)
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


def plan_of(endpoint: Endpoint, streams: int, rounds: int) -> PartPlan:
    count = streams * rounds
    request = TraceRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=CHUNKS)
    items = (Item(prompt="x"),)
    return PartPlan(
        endpoint=endpoint,
        bodies=BodySettings(model=MODEL, chat=False, streamed=True, fields={}, items=items),
        requests=(request,) * count,
        indices=tuple(range(count)),
        total=count,
        concurrency=streams,
    )
