"""Where more load stops bringing more throughput."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.load.report import Knee

GAIN = 1.05  # a load that brings less than this over the best before it has brought nothing
LEAST_POINTS = 3


def find_knee(loads: Sequence[float], throughputs: Sequence[float]) -> Knee | None:
    """Fits min(slope x load, plateau), the two asymptotes of a closed system (Denning and Buzen
    1978, section 4), to ascending loads by least squares of relative errors: for each way to part
    the points in two. The knee is where they meet. None with fewer than three loads, or without any
    throughput."""
    x, y = np.asarray(loads, dtype=np.float64), np.asarray(throughputs, dtype=np.float64)
    if len(x) < LEAST_POINTS or (y <= 0).any() or (x <= 0).any():
        return None
    best: tuple[float, float, float] | None = None
    for rising in range(1, len(x) + 1):
        # Of relative errors sum (f / y - 1)^2 the minimum is sum(u) / sum(u^2) with u = f / y.
        u = x[:rising] / y[:rising]
        slope = float(u.sum() / (u @ u))
        flat = 1 / y[rising:]
        plateau = float(flat.sum() / (flat @ flat)) if len(flat) else slope * float(x[-1])
        fitted = np.minimum(slope * x, plateau)
        error = float((((fitted - y) / y) ** 2).sum())
        if best is None or error < best[0]:
            best = error, slope, plateau
    assert best is not None
    _, slope, plateau = best
    return Knee(
        load=plateau / slope,
        slope=slope,
        plateau=plateau,
        reached=plateau / slope < float(x[-1]),
    )


def is_flat(throughputs: Sequence[float]) -> bool:
    """Whether the last two loads of a sweep brought nothing over the best before them."""
    if len(throughputs) < LEAST_POINTS:
        return False
    best = max(throughputs[:-2])
    return max(throughputs[-2:]) < GAIN * best
