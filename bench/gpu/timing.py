"""Times of launches: replays of a CUDA graph over inputs that exceed the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.gpu.environment import Bench, RunMode, l2_bytes
from bench.gpu.limits import Ceilings, Cost

Call = Callable[[], Any]
MOST_SAMPLES, FEWEST_SAMPLES = 40, 5
_SAMPLE_S = 4e-3  # approximate duration of a sample
CELL_S = 0.2  # sampling time of a cell
_MOST_SETS = 256  # most input sets, which only small kernels reach


class Timing(NamedTuple):
    """Seconds of one launch; `low_s` and `high_s` are the 10th and 90th percentiles of the
    samples."""

    median_s: float
    low_s: float
    high_s: float
    samples: int


def input_sets(num_bytes: int, device: torch.device) -> int:
    """Return how many input sets of `num_bytes` each must take turns so that none stays in the L2
    cache."""
    return max(1, min(_MOST_SETS, -(-4 * l2_bytes(device) // max(num_bytes, 1))))


def time_calls(bench: Bench, calls: Sequence[Call], seconds: float = CELL_S) -> Timing | None:
    """Return the time of one call: a sample is the mean over `calls`, run in sequence.

    First, every call runs once, which compiles its kernel. Samples are then taken for about
    `seconds`, so slow calls get fewer. Without a GPU nothing is timed, and the result is None;
    with the interpreter only the first call runs.
    """
    if bench.mode.runs:
        for call in calls if bench.full else calls[:1]:
            call()
    if bench.mode is not RunMode.DEVICE:
        return None
    torch.cuda.synchronize()
    replay = _captured(calls)
    once = max(_elapsed_s(replay, 1), _elapsed_s(replay, 1), 1e-6)
    repeats = max(1, round(_SAMPLE_S / once))
    samples = max(FEWEST_SAMPLES, min(MOST_SAMPLES, int(seconds / (repeats * once))))
    return summarize([_elapsed_s(replay, repeats) / (repeats * len(calls)) for _ in range(samples)])


def _captured(calls: Sequence[Call]) -> Call:
    """Return a function that replays the calls as one CUDA graph. To warm up, the first two calls
    run on another stream before the capture."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replay: Call = graph.replay
    return replay


def _elapsed_s(replay: Call, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def summarize(seconds: Sequence[float]) -> Timing:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered))


def figures(timing: Timing | None, cost: Cost, ceilings: Ceilings | None) -> dict[str, Any]:
    """Return the columns of a timed kernel. Columns that need a missing `timing` or `ceilings` are
    None."""
    row: dict[str, Any] = dict.fromkeys(FIGURES)
    row |= {"mbytes": cost.num_bytes / 1e6, "gflop": cost.flop / 1e9}
    if timing is None:
        return row | {"status": "unmeasured"}
    row |= {
        "median_us": timing.median_s * 1e6,
        "low_us": timing.low_s * 1e6,
        "high_us": timing.high_s * 1e6,
        "samples": timing.samples,
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
    "median_us", "low_us", "high_us", "samples", "mbytes", "gflop", "bound", "limit_us",
    "fraction_of_limit", "tflop_per_s",
)  # fmt: skip
