"""Speed of the simulator: `python -m bench.simulator [TRACE]`.

A trace runs through `cbatch sim` with default options: Llama-3.1-8B on an H100 by roofline, with a
KV pool of realistic size. Without a trace, requests have the lengths and the rate of Azure's
conversation trace. CPU seconds are of the replay, which reads the trace.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import print_report
from cbatch.cli.parser import CommandParser
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import lognormal
from sim.workload.traces.reader import write_requests

LIMIT_US = 44.0  # target for the CPU time per step, in microseconds


def write_like_azure(path: Path, requests: int) -> None:
    """Write 5.53 requests a second; lengths have the mean and CV of Azure's trace of 2023."""
    lengths = lognormal(1155, 0.96, high=14_050), lognormal(211, 0.77, high=1_000)
    made = generate(lambda rng: poisson(5.53, rng), *lengths, requests=requests, seed=0)
    write_requests(path, made)


def measure(trace: Path, requests: int) -> dict[str, Any]:
    simulation = build(Scenario(trace=str(trace), requests=requests))
    started_cpu_s = time.process_time()
    report = simulation.run()
    cpu_s = time.process_time() - started_cpu_s
    us_per_step = cpu_s / (report.steps or 1) * 1e6
    return {
        "requests": report.requests,
        "steps": report.steps,
        "running": round(report.mean_running or 0.0, 1),
        "cpu_s": round(cpu_s, 2),
        "us_per_step": round(us_per_step, 1),
        "of_limit": round(us_per_step / LIMIT_US, 2),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = CommandParser(prog="python -m bench.simulator", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=2_000, help="number of requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = arguments.trace or Path(folder) / "made-up.jsonl"
        if arguments.trace is None:
            write_like_azure(trace, arguments.requests)
        row = measure(trace, arguments.requests)
    note = f"limit {LIMIT_US:.0f} us of CPU a step; one thread, garbage collector on"
    title = f"simulator: {trace.name}, Llama-3.1-8B on H100 by roofline"
    print_report(title, [row], notes=[note])


if __name__ == "__main__":
    main()
