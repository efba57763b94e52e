"""Speed of the simulator: `python -m bench.simulator [TRACE]`.

A trace (without one, as many requests with the lengths and the rate of Azure's conversation trace)
through the scheduler, Llama-3.1-8B on an H100 by roofline, KV pool of its real size. CPU seconds
are of the replay, reading the trace included; start-up is a process of its own that imports it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.report import print_report
from cbatch.core.scheduler.config import SchedulerConfig
from sim.cost.roofline import Roofline, RooflineConfig, load_gpu, load_shape
from sim.distributions.arrivals import poisson
from sim.distributions.lengths import lognormal
from sim.executor.modelled import ModelledExecutor
from sim.replay.replay import replay
from sim.traces.changes import sample
from sim.traces.reader import Trace
from sim.traces.request import TraceRequest
from sim.workload.generate import generate
from sim.workload.sources import OpenLoop

LIMIT_US = 44.0  # a step, from the issue that this answers
MAX_SLOTS = 256
CONTEXT_TOKENS = 131_072


def like_azure(requests: int) -> Iterable[TraceRequest]:
    """5.53 requests a second; lengths of the mean and CV of the trace of 2023."""
    lengths = lognormal(1155, 0.96, high=14_050), lognormal(211, 0.77, high=1_000)
    return generate(lambda rng: poisson(5.53, rng), *lengths, requests=requests, seed=0)


def measure(requests: Iterable[TraceRequest]) -> dict[str, Any]:
    roofline = RooflineConfig(gpu=load_gpu("H100"), shape=load_shape("llama-3.1-8b"))
    config = SchedulerConfig(
        num_blocks=roofline.num_blocks(16), max_slots=MAX_SLOTS, max_model_tokens=CONTEXT_TOKENS
    )
    executor = ModelledExecutor(max_slots=MAX_SLOTS, cost=Roofline(roofline))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    report = replay(OpenLoop(requests), config, executor)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    steps = report.steps or 0
    us_per_step = cpu_s / steps * 1e6
    return {
        "requests": report.requests,
        "steps": steps,
        "running": round(report.mean_running or 0.0, 1),
        "simulated_s": round(report.duration_s, 1),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "us_per_step": round(us_per_step, 1),
        "of_limit": round(us_per_step / LIMIT_US, 2),
        "requests_per_cpu_s": round(report.requests / cpu_s, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def start_up_s() -> float:
    """Of a process that imports the command and what it runs."""
    code = "import cbatch.cli.main, sim.replay.replay, sim.cost.roofline"
    code += ", sim.executor.modelled, sim.traces.reader"
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulator", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=2_000, help="the first so many")
    arguments = parser.parse_args()
    requests = like_azure(arguments.requests)
    if arguments.trace is not None:
        requests = sample(Trace(arguments.trace), most=arguments.requests)
    start_s = min(start_up_s() for _ in range(3))
    row = measure(requests) | {"start_up_s": round(start_s, 2)}
    name = "made up" if arguments.trace is None else arguments.trace.name
    print_report(
        f"simulator: {name}, Llama-3.1-8B on H100 by roofline",
        [row],
        notes=(f"limit {LIMIT_US:.0f} us of CPU a step; one thread, garbage collector on",),
    )


if __name__ == "__main__":
    main()
