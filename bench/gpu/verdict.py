"""Rows of correctness: what was found, what is allowed, and whether it passed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.gpu.cells import Cell, Row
from bench.gpu.world import Bench

UNMEASURED: Row = {"found": None, "allowed": None, "status": "unmeasured"}


def check(bench: Bench, kernel: str, case: str, run: Callable[..., Row], *given: Any) -> Cell:
    """A cell of correctness, `run(bench, *given)`, where kernels run at all."""

    def checked() -> Row:
        return run(bench, *given) if bench.world.runs else UNMEASURED

    return Cell(f"{kernel} {case}", {"kernel": kernel, "case": case}, checked)


def within(what: str, found: float, allowed: float, **more: object) -> Row:
    """A distance; NaN never passes, and JSON has no number for it."""
    status = "ok" if found <= allowed else "wrong"
    shown = found if math.isfinite(found) else str(found)
    return {"what": what, "found": shown, "allowed": allowed, "status": status, **more}


def none_of(what: str, mismatches: int, tried: int) -> Row:
    """Of `tried` >= 1 comparisons not one may fail."""
    row = within(what, mismatches, 0, tried=tried)
    return row if tried > 0 else row | {"status": "wrong"}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of the reference; NaN where anything is."""
    wide = expected.float()
    return float((found.float() - wide).norm() / wide.norm())
