"""What the device can do, measured in the run that uses it: a large copy and a large product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu.cells import Cell, Journal, Row
from bench.gpu.limits import Ceilings
from bench.gpu.timing import Timing, time_calls
from bench.gpu.world import Bench

SECTION = "limits"
_COPY_BYTES, _EDGE = 2 << 30, 8192  # copied; of the square matrices


def cells(bench: Bench) -> Iterator[Cell]:
    for name, run in (("copy", _copy), ("matmul", _matmul)):
        yield Cell(name, {"ceiling": name}, lambda run=run: run(bench))


def load_ceilings(out: Path) -> Ceilings | None:
    """As measured in this run; None if they were not."""
    rows = Journal(out / f"{SECTION}.jsonl").rows
    rates = [rows.get(name, {}).get("per_s") for name in ("copy", "matmul")]
    if not all(rates):
        return None
    return Ceilings(*rates)


def _copy(bench: Bench) -> Row:
    count = _COPY_BYTES if bench.full else 1 << 12
    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    timing = time_calls(bench, [lambda: target.copy_(source)])
    return _row("bytes, read and written", 2 * count, timing)


def _matmul(bench: Bench) -> Row:
    edge = _EDGE if bench.full else 16
    a, b = (torch.randn(edge, edge, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    timing = time_calls(bench, [lambda: torch.mm(a, b, out=out)])
    return _row(f"flop, bf16 {_EDGE}^3, random data", 2 * edge**3, timing)


def _row(unit: str, work: int, timing: Timing | None) -> Row:
    if timing is None:
        return {"unit": unit, "per_s": None, "samples": None, "status": "unmeasured"}
    return {"unit": unit, "per_s": work / timing.median_s, "samples": timing.samples}
