"""Times of launches: replays of a CUDA graph over inputs that exceed the cache. The kernels of a
step, from torch.profiler. The device's ceilings: the highest rates at which it reads, copies and
multiplies, each the best of several kernels over buffers far larger than any cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench_cudagraph

from bench.gpu.cells import Bench, Cell, Row
from bench.gpu.limits import Ceilings, Cost
from triton_kernels.build.jit import jit

Call = Callable[[], Any]
CELL_S = 0.2  # sampling time of a cell
_SAMPLES = 10  # taken by Triton
_MAX_SETS = 256  # of inputs, which only small kernels reach
_MAX_KERNELS, _NAME_CHARS = 40, 90
BYTES, EDGE = 4 << 30, 8192  # bytes of a ceiling's buffer; rows of its square matrices
PROGRAMS = 132 * 8  # launched programs: 8 for each multiprocessor of an H100 or H200
_WARM_S = 0.5  # work before the first sample: an idle device has low clocks
_TILES = ((4096, 4), (8192, 8), (16384, 8))  # (words per load, warps)


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
        limit_s, row["bound"] = cost.limit(ceilings)
        row |= {"limit_us": limit_s * 1e6, "fraction_of_limit": limit_s / times[0]}
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
            calls, us = totals.get(name := event.name[:_NAME_CHARS], (0, 0.0))
            totals[name] = calls + 1, us + event.time_range.elapsed_us()
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:_MAX_KERNELS]
    return {
        "kernels": [
            {"kernel": name, "calls": round(calls / steps, 2), "us": round(us / steps, 2)}
            for name, (calls, us) in longest
        ]
    }


# -- ceilings


@jit
def read_kernel(source_ptr, sums_ptr, num_words, TILE: tl.constexpr):
    """Read all words. Each program xors every `num_programs`-th tile and stores one word."""
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for first in range(tl.program_id(0) * TILE, num_words, tl.num_programs(0) * TILE):
        total ^= tl.load(source_ptr + first + lanes)
    tl.store(sums_ptr + tl.program_id(0), tl.max(total, axis=0))


def cells(bench: Bench) -> Iterator[Cell]:
    for name, run in (("read", _read), ("copy", _copy), ("matmul", _matmul)):
        yield Cell(name, {"ceiling": name}, partial(run, bench))


def load_ceilings(bench: Bench) -> Ceilings | None:
    """Return the rates measured in this run; None if one is missing."""
    rows = bench.of("ceilings")
    rates = [rows.get(name, {}).get("per_s") for name in ("read", "matmul")]
    return Ceilings(*rates) if all(rates) else None


def _read(bench: Bench) -> Row:
    source = torch.empty(BYTES // 4, dtype=torch.int32, device=bench.device).random_()
    launch = partial(read_kernel[(PROGRAMS,)], source, source.new_empty(PROGRAMS), len(source))
    calls: dict[str, Call] = {
        f"Triton, {words} words": partial(launch, TILE=words, num_warps=warps)
        for words, warps in _TILES
    }
    return _best("bytes read", source.nbytes, calls)


def _copy(bench: Bench) -> Row:
    source = torch.empty(BYTES // 4, dtype=torch.int32, device=bench.device).random_()
    copy = partial(torch.empty_like(source).copy_, source)
    return _best("bytes, read and written", 2 * source.nbytes, {"memcpy": copy})


def _matmul(bench: Bench) -> Row:
    a, b = (torch.randn(EDGE, EDGE, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    # Products of rows of `a`, first with columns of `b`, then with rows of `b`.
    calls = {
        "rows by columns": partial(torch.mm, a, b),
        "rows by rows": partial(torch.mm, a, b.t()),
    }
    return _best(f"flop, bf16 {EDGE}^3, random data", 2 * EDGE**3, calls)


def _best(unit: str, work: int, calls: dict[str, Call]) -> Row:
    """Return a row with the highest rate and the rate of every call."""
    time_calls(list(calls.values()), _WARM_S)
    rates = {name: work / time_calls([call])[0] for name, call in calls.items()}
    best = max(rates, key=lambda name: rates[name])
    return {"unit": unit, "per_s": rates[best], "best": best, "rates": rates}
