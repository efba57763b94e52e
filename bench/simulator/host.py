"""Processor time of servers and of their client, measured on synthetic requests, for `--host`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sim.replay.host import Host, Work

from bench.simulator.real import serve_replicas
from bench.simulator.simulated import SimulatedReplicas
from cbatch.core.prices.calibration import Calibration
from cbatch.engine.prices.fit import nonnegative_least_squares
from sim.workload.sources import OpenLoop
from sim.workload.traces.request import TraceRequest

PROMPT_TOKENS = 560  # typical prompt length of a fleet
IDLE_S = 3.0  # duration of the run without requests


def measure_host(ports: Sequence[int], calibration: Calibration) -> Host:
    """Fit the processor time per request, step and token to runs on an idle replica, for servers
    (children of this process) and for the client (this process). Needs two replicas or more."""
    rows, servers_s, clients_s = [], [], []
    for requests in (*runs_of(), []):
        before_s, began_s, client_s, steps = server_cpu_s(), time.monotonic(), 0.0, 0
        if requests:
            client_s = serve_replicas(ports[:1], requests)[1]
            steps = steps_of(calibration, requests)
        else:  # the idle work of a server
            time.sleep(IDLE_S)
        tokens = sum(request.output_tokens for request in requests)
        rows.append((len(requests), steps, tokens, time.monotonic() - began_s))
        servers_s.append(server_cpu_s() - before_s)
        clients_s.append(client_s)
    counts = np.array(rows, dtype=np.float64)
    server, client = (
        Work(*nonnegative_least_squares(counts, np.array(seconds)).tolist()[:3])
        for seconds in (servers_s, clients_s)
    )
    return Host(len(os.sched_getaffinity(0)), server=server, client=client)


def steps_of(calibration: Calibration, requests: Sequence[TraceRequest]) -> int:
    """Return the number of steps on one replica that has room for all requests."""
    return SimulatedReplicas(calibration, num_blocks=4096).replay(OpenLoop(requests))[0].steps or 0


def runs_of() -> list[list[TraceRequest]]:
    """Return three runs: long prompts with one token each, long outputs one after another, and many
    requests at once."""
    return [
        _requests([0.1 * i for i in range(40)], 1),
        _requests([0.6 * i for i in range(8)], 200),
        _requests([2.5 * (i // 16) for i in range(32)], 120),
    ]


def _requests(arrivals_s: Sequence[float], tokens: int) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=at_s, prompt_tokens=PROMPT_TOKENS, output_tokens=tokens)
        for at_s in arrivals_s
    ]


def server_cpu_s() -> float:
    """Return the processor seconds of all `cbatch serve` children of this process, without their
    engines."""
    total_ns = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            process = Path("/proc") / pid
            if b"serve" in (process / "cmdline").read_bytes().split(b"\0"):
                for task in (process / "task").glob("*/schedstat"):
                    total_ns += int(task.read_text().split()[0])
    return total_ns / 1e9
