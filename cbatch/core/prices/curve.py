"""Straight lines between measured points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Curve:
    """Seconds by a whole number, from points of it. A count below the first point costs as much as
    the first; beyond the last point the last line continues."""

    def __init__(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        order = np.argsort(counts)
        xs, ys = np.asarray(counts)[order], np.asarray(seconds)[order]
        self.most = int(xs[-1])
        self._slope_s = float((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        self._seconds: list[float] = np.interp(np.arange(self.most + 1), xs, ys).tolist()

    def __call__(self, count: int) -> float:
        if count <= self.most:
            return self._seconds[count]
        return self._seconds[-1] + self._slope_s * (count - self.most)

    @classmethod
    def total(cls, curves: Sequence[tuple[int, Curve]]) -> Curve:
        """Return the sum of curves, each multiplied by its count, to the last point of the
        shortest."""
        most = min(curve.most for _, curve in curves)
        counts = range(most + 1)
        return cls(counts, [sum(times * curve(n) for times, curve in curves) for n in counts])
