"""Linear interpolation between measured points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Curve:
    """Seconds as a piecewise linear function of a count. Below the first point it is constant;
    beyond the last point, `max_count`, it continues the last line."""

    def __init__(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        order = np.argsort(counts)
        xs, ys = np.asarray(counts)[order], np.asarray(seconds)[order]
        self.max_count = int(xs[-1])
        self._slope_s = float((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        self._seconds: list[float] = np.interp(np.arange(self.max_count + 1), xs, ys).tolist()

    def __call__(self, count: int) -> float:
        if count <= self.max_count:
            return self._seconds[count]
        return self._seconds[-1] + self._slope_s * (count - self.max_count)

    @classmethod
    def total(cls, curves: Sequence[tuple[int, Curve]]) -> Curve:
        """Return the sum of factor * curve, up to the smallest `max_count` of the curves."""
        counts = range(min(curve.max_count for _, curve in curves) + 1)
        return cls(counts, [sum(times * curve(n) for times, curve in curves) for n in counts])
