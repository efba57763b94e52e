"""Times of launches: replays of a CUDA graph over inputs that do not fit the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.gpu.limits import Ceilings, Cost
from bench.gpu.world import Bench, World, l2_bytes

Call = Callable[[], Any]
MOST_SAMPLES, FEWEST_SAMPLES = 40, 5
_SAMPLE_S = 4e-3  # a sample lasts at least about this long
CELL_S = 0.25  # of sampling, while the section has time for it
_MOST_SETS = 256  # of a small kernel, 0.5 MB each or more


class Timing(NamedTuple):
    """Seconds of one launch. `low_s` and `high_s` are the 10th and 90th percentile of samples."""

    median_s: float
    low_s: float
    high_s: float
    samples: int
    method: str  # "graph", or "eager" where the launches could not be captured


def input_sets(num_bytes: int, device: torch.device) -> int:
    """How many sets of inputs of that size to go round, so that none is found in the cache."""
    return max(1, min(_MOST_SETS, -(-4 * l2_bytes(device) // max(num_bytes, 1))))


def time_calls(bench: Bench, calls: Sequence[Call], seconds: float = CELL_S) -> Timing | None:
    """Of one call on average, `calls` following one another; None where nothing is timed.

    Everything is called once before, which compiles. Interpreted, that is all. `seconds` of samples
    are taken, and fewer of what is slow or when little time is left.
    """
    if bench.world.runs:
        for call in calls if bench.full else calls[:1]:
            call()
    if bench.world is not World.DEVICE or bench.warming:
        return None
    torch.cuda.synchronize()
    replay, method = _captured(calls), "graph"
    if replay is None:
        replay, method = _in_turn(calls), "eager"
    return _sample(replay, len(calls), method, min(seconds, max(bench.left_s() / 4, 0.02)))


def _captured(calls: Sequence[Call]) -> Call | None:
    """The calls as one graph; None if they cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError as error:
        if "captur" not in str(error).lower():
            raise
        torch.cuda.synchronize()
        return None
    return graph.replay


def _in_turn(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _sample(replay: Call, calls: int, method: str, seconds: float) -> Timing:
    once = max(_elapsed_s(replay, 1), _elapsed_s(replay, 1), 1e-6)
    repeats = max(1, round(_SAMPLE_S / once))
    wanted = int(seconds / (repeats * once))
    samples = max(FEWEST_SAMPLES, min(MOST_SAMPLES, wanted))
    found = sorted(_elapsed_s(replay, repeats) / (repeats * calls) for _ in range(samples))
    return summarize(found, method)


def _elapsed_s(replay: Call, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def summarize(seconds: Sequence[float], method: str) -> Timing:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered), method)


def figures(timing: Timing | None, cost: Cost, ceilings: Ceilings | None) -> dict[str, Any]:
    """The columns of a timed kernel; None where it was not measured, or no ceiling was."""
    row: dict[str, Any] = dict.fromkeys(FIGURES)
    row |= {"mbytes": cost.num_bytes / 1e6, "gflop": cost.flop / 1e9}
    if timing is None:
        return row | {"status": "unmeasured"}
    row |= {
        "median_us": timing.median_s * 1e6,
        "low_us": timing.low_s * 1e6,
        "high_us": timing.high_s * 1e6,
        "samples": timing.samples,
        "method": timing.method,
        "tflop_per_s": cost.flop / timing.median_s / 1e12,
    }
    if ceilings is not None:
        row |= {
            "bound": cost.bound(ceilings),
            "limit_us": cost.limit_s(ceilings) * 1e6,
            "fraction_of_limit": cost.limit_s(ceilings) / timing.median_s,
        }
    return row


FIGURES = (
    "median_us", "low_us", "high_us", "samples", "method", "mbytes", "gflop", "bound", "limit_us",
    "fraction_of_limit", "tflop_per_s",
)  # fmt: skip
