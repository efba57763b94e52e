"""Ceilings: the highest rates at which the device reads, copies and multiplies. Each run measures
them for its own figures.

A ceiling is the best rate of several kernels over buffers far larger than any cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl

from bench.gpu.cells import Cell, Row
from bench.gpu.environment import Bench
from bench.gpu.limits import Ceilings
from bench.gpu.timing import Call, time_calls
from triton_kernels.build.jit import jit

_BYTES, _EDGE = 4 << 30, 8192  # bytes of a buffer; rows of a square matrix
_WARM_S = 0.5  # work before the first sample: an idle device has low clocks
_TILES = ((4096, 4), (8192, 8), (16384, 8))  # (words per load, warps)
_PROGRAMS = 132 * 8  # launched programs: 8 for each multiprocessor of an H100 or H200


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
    rows = bench.results.of("ceilings")
    rates = [rows.get(name, {}).get("per_s") for name in ("read", "matmul")]
    return Ceilings(*rates) if all(rates) else None


def _words(bench: Bench) -> torch.Tensor:
    size = (_BYTES // 4,)
    return torch.randint(-(1 << 31), 1 << 31, size, dtype=torch.int32, device=bench.device)


def _read(bench: Bench) -> Row:
    source = _words(bench)
    launch = partial(read_kernel[(_PROGRAMS,)], source, source.new_empty(_PROGRAMS), len(source))
    calls: dict[str, Call] = {
        f"Triton, {words} words": partial(launch, TILE=words, num_warps=warps)
        for words, warps in _TILES
    }
    return _best(bench, "bytes read", source.nbytes, calls)


def _copy(bench: Bench) -> Row:
    source = _words(bench)
    copy = partial(torch.empty_like(source).copy_, source)
    return _best(bench, "bytes, read and written", 2 * source.nbytes, {"memcpy": copy})


def _matmul(bench: Bench) -> Row:
    edge = _EDGE
    a, b = (torch.randn(edge, edge, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    # Products of rows of `a`, first with columns of `b`, then with rows of `b`.
    calls = {
        "rows by columns": partial(torch.mm, a, b),
        "rows by rows": partial(torch.mm, a, b.t()),
    }
    return _best(bench, f"flop, bf16 {_EDGE}^3, random data", 2 * edge**3, calls)


def _best(bench: Bench, unit: str, work: int, calls: dict[str, Call]) -> Row:
    """Return a row with the highest rate and the rate of every call."""
    time_calls(list(calls.values()), _WARM_S)
    rates = {name: work / time_calls([call])[0] for name, call in calls.items()}
    best = max(rates, key=lambda name: rates[name])
    return {"unit": unit, "per_s": rates[best], "best": best, "rates": rates}
