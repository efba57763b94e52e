"""Times of launches: replays of a CUDA graph over inputs that exceed the cache. The kernels of a
step, from torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench_cudagraph

from bench.gpu.cells import Row
from bench.gpu.environment import Bench
from bench.gpu.limits import Ceilings, Cost

Call = Callable[[], Any]
CELL_S = 0.2  # sampling time of a cell
_SAMPLES = 10  # taken by Triton
_MAX_SETS = 256  # of inputs, which only small kernels reach
STEPS, STEP_KERNELS = "steps", "kernels of a step"  # values of `what` in rows of an engine
_MAX_KERNELS, _NAME_CHARS = 40, 90


def input_sets(bench: Bench, num_bytes: int) -> int:
    """Return how many input sets of `num_bytes` must take turns so that none stays in the L2
    cache."""
    return max(1, min(_MAX_SETS, -(-4 * bench.l2_bytes // max(num_bytes, 1))))


def time_calls(calls: Sequence[Call], seconds: float = CELL_S) -> list[float]:
    """Return the median, 10th and 90th percentile of the seconds of one call. A sample is the mean
    over `calls`, run in sequence."""

    def run() -> None:
        for call in calls:
            call()

    ms = do_bench_cudagraph(run, rep=1e3 * seconds / _SAMPLES, quantiles=(0.5, 0.1, 0.9))
    return [1e-3 * each / len(calls) for each in ms]


def figures(times: Sequence[float], cost: Cost, ceilings: Ceilings | None) -> Row:
    """Return the columns of a timed kernel."""
    row: Row = {"mbytes": cost.num_bytes / 1e6, "gflop": cost.flop / 1e9}
    row |= dict(zip(("median_us", "low_us", "high_us"), (1e6 * s for s in times), strict=True))
    row["tflop_per_s"] = cost.flop / times[0] / 1e12
    if ceilings is not None:
        limit_s = cost.limit_s(ceilings)
        row |= {"bound": cost.bound(ceilings), "limit_us": limit_s * 1e6}
        row["fraction_of_limit"] = limit_s / times[0]
    return row


def step_kernels(step: Call, steps: int) -> Row:
    """Return kernels by total time, longest first, with calls and microseconds per step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    totals: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:_NAME_CHARS]
            calls, us = totals.get(name, (0, 0.0))
            totals[name] = calls + 1, us + event.time_range.elapsed_us()
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:_MAX_KERNELS]
    return {
        "kernels": [
            {"kernel": name, "calls": round(calls / steps, 2), "us": round(us / steps, 2)}
            for name, (calls, us) in longest
        ]
    }
