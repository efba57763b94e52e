"""What this machine's processors do beside engines' steps, for `--host`: what servers and client
compute is their processors' time over made-up requests, which share nothing with a run that is
foretold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.simulator.fleet import RoutedCalls, fleet_steps, replay_real
from cbatch.engine.price_fit import nonnegative_least_squares
from sim.cost.calibrated import Calibration
from sim.replay.host import Host, Work
from sim.traces.request import TraceRequest

PROMPT_TOKENS = 560
IDLE_S = 3.0


class Seen(msgspec.Struct, frozen=True):
    """Of a run: its requests, steps, tokens and seconds; the processors' seconds of servers and of
    the client."""

    counts: tuple[int, int, int, float]
    server_s: float
    client_s: float


def measure_host(ports: Sequence[int], calibration: Calibration) -> Host:
    """Of two idle replicas or more. Servers are this process's children; it is the client."""
    runs = [_watched(ports, calibration, requests) for requests in runs_of()]
    before_s = _servers_s()
    time.sleep(IDLE_S)
    runs.append(Seen((0, 0, 0, IDLE_S), _servers_s() - before_s, 0.0))
    counts = np.array([run.counts for run in runs], dtype=np.float64)
    server, client = (
        Work(*nonnegative_least_squares(counts, np.array(seconds)).tolist()[:3])
        for seconds in ([run.server_s for run in runs], [run.client_s for run in runs])
    )
    return Host(len(os.sched_getaffinity(0)), server=server, client=client)


def runs_of() -> list[list[TraceRequest]]:
    """Of long prompts and a token each; of long outputs one after another; of many at a time."""
    return [
        _made([0.1 * i for i in range(40)], 1),
        _made([0.6 * i for i in range(8)], 200),
        _made([2.5 * (i // 16) for i in range(32)], 120),
    ]


def _made(arrivals_s: Sequence[float], tokens: int) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=at_s, prompt_tokens=PROMPT_TOKENS, output_tokens=tokens)
        for at_s in arrivals_s
    ]


def _watched(ports: Sequence[int], calibration: Calibration, requests: list[TraceRequest]) -> Seen:
    before_s, started_s = _servers_s(), time.monotonic()
    seen: RoutedCalls = replay_real(ports[:1], "round-robin", requests)
    server_s, elapsed_s = _servers_s() - before_s, time.monotonic() - started_s
    client_s = sum(part.cpu_s for part in seen.run.parts)
    steps, tokens = fleet_steps(calibration, requests), sum(r.output_tokens for r in requests)
    return Seen((len(requests), steps, tokens, elapsed_s), server_s, client_s)


def _servers_s() -> float:
    """Of processors, in all `cbatch serve` that this process has started, without their engines."""
    total_ns = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            process = Path("/proc") / pid
            if b"serve" in (process / "cmdline").read_bytes().split(b"\0"):
                for task in (process / "task").glob("*/schedstat"):
                    total_ns += int(task.read_text().split()[0])
    return total_ns / 1e9
