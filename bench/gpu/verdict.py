"""Rows of correctness: what was found, what is allowed, and whether it passed."""

from __future__ import annotations

from torch import Tensor

from bench.gpu.cells import Row

UNMEASURED: Row = {"found": None, "allowed": None, "status": "unmeasured"}


def within(what: str, found: float, allowed: float, **more: object) -> Row:
    """A distance; NaN never passes."""
    status = "ok" if found <= allowed else "wrong"
    return {"what": what, "found": found, "allowed": allowed, "status": status, **more}


def above(what: str, found: float, needed: float, **more: object) -> Row:
    """A test of the test: a broken variant must be at least so far away."""
    status = "ok" if found >= needed else "wrong"
    return {"what": what, "found": found, "allowed": f">= {needed}", "status": status, **more}


def none_of(what: str, mismatches: int, tried: int) -> Row:
    """Of `tried` >= 1 comparisons not one may fail."""
    status = "ok" if mismatches == 0 and tried > 0 else "wrong"
    return {"what": what, "found": mismatches, "allowed": 0, "tried": tried, "status": status}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of the reference; NaN where anything is."""
    wide = expected.float()
    return float((found.float() - wide).norm() / wide.norm())
