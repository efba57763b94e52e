"""Ceilings: the highest rates at which the device reads, copies and multiplies. Each run measures
them for its own figures.

A ceiling is the best rate of several kernels over buffers far larger than any cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bench.gpu.cells import Cell, Journal, Row
from bench.gpu.environment import Bench
from bench.gpu.limits import Ceilings
from bench.gpu.timing import Call, time_calls
from triton_kernels.build.jit import jit

SECTION = "ceilings"
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


@jit
def copy_kernel(source_ptr, target_ptr, num_words, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    for first in range(tl.program_id(0) * TILE, num_words, tl.num_programs(0) * TILE):
        tl.store(target_ptr + first + lanes, tl.load(source_ptr + first + lanes))


def cells(bench: Bench) -> Iterator[Cell]:
    for name, run in (("read", _read), ("copy", _copy), ("matmul", _matmul)):
        yield Cell(name, {"ceiling": name}, functools.partial(run, bench))


def load_ceilings(out: Path) -> Ceilings | None:
    """Return the rates measured in this run; None if one is missing."""
    rows = Journal(out / f"{SECTION}.jsonl").rows
    rates = [rows.get(name, {}).get("per_s") for name in ("read", "matmul")]
    return Ceilings(*rates) if all(rates) else None


def _words(bench: Bench) -> Tensor:
    """Return a buffer of random int32; its length is a multiple of the largest tile."""
    count = _BYTES // 4 if bench.full else 1 << 14
    return torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int32, device=bench.device)


def _tiled(bench: Bench, function: Any, source: Tensor, target: Tensor) -> dict[str, Call]:
    """Return launches of the kernel with several tile sizes; none if kernels do not run here."""
    launch = functools.partial(
        function[(_PROGRAMS if bench.full else 2,)], source, target, len(source)
    )
    return {
        f"Triton, {tile} words": functools.partial(launch, TILE=tile, num_warps=warps)
        for tile, warps in _TILES
        if bench.mode.runs
    }


def _read(bench: Bench) -> Row:
    source = _words(bench)
    sums = source.new_empty(_PROGRAMS if bench.full else 2)
    calls: dict[str, Call] = {"torch sum": lambda: torch.sum(source.view(torch.float32))}
    return _best(
        bench, "bytes read", source.nbytes, calls | _tiled(bench, read_kernel, source, sums)
    )


def _copy(bench: Bench) -> Row:
    source = _words(bench)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"memcpy": lambda: target.copy_(source)}
    calls |= _tiled(bench, copy_kernel, source, target)
    return _best(bench, "bytes, read and written", 2 * source.nbytes, calls)


def _matmul(bench: Bench) -> Row:
    edge = _EDGE if bench.full else 16
    a, b = (torch.randn(edge, edge, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls: dict[str, Call] = {
        # Products of rows of `a`, first with columns of `b`, then with rows of `b`.
        "rows by columns": lambda: torch.mm(a, b, out=out),
        "rows by rows": lambda: torch.mm(a, b.t(), out=out),
    }
    return _best(bench, f"flop, bf16 {_EDGE}^3, random data", 2 * edge**3, calls)


def _best(bench: Bench, unit: str, work: int, calls: dict[str, Call]) -> Row:
    """Return a row with the highest rate and the rate of every call."""
    if bench.full:
        time_calls(bench, list(calls.values()), _WARM_S)
    timings = {name: time_calls(bench, [call]) for name, call in calls.items()}
    rates = {name: work / t.median_s for name, t in timings.items() if t is not None}
    if not rates:
        return {"unit": unit, "per_s": None, "status": "unmeasured"}
    best = max(rates, key=lambda name: rates[name])
    return {"unit": unit, "per_s": rates[best], "best": best, "rates": rates}
