"""Tables of measured durations, interpolated linearly on every axis.

Beyond the last point the last line continues: all times measured here grow linearly once a device
is full. Cost models give the largest measured counts (`max_rows`, `max_step_tokens`). A scheduler
configuration above these is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np


class Grid:
    """Multilinear interpolation in a full lattice: `values[i, j, ...]` at `axes[0][i], ...`. Every
    axis ascends and has at least two points."""

    def __init__(self, axes: Sequence[Sequence[float]], values: np.ndarray) -> None:
        self.axes = [list(axis) for axis in axes]
        self._values = values

    def __call__(self, *point: float) -> float:
        slices, shares = [], []
        for axis, x in zip(self.axes, point, strict=True):
            low = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
            slices.append(slice(low, low + 2))
            shares.append((x - axis[low]) / (axis[low + 1] - axis[low]))
        cell = self._values[tuple(slices)]
        for share in shares:
            cell = cell[0] + share * (cell[1] - cell[0])
        return float(cell)


class Lines:
    """Seconds by two counts, with a line along the second count for each measured value of the
    first. The lines may have different points: a large first count is measured over a shorter range
    of the second. Between and beyond the lines the interpolation is linear."""

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        """Take seconds by (first, second). Needs at least two values of the first count, and for
        each of them at least two of the second."""
        self.firsts = sorted({first for first, _ in points})
        self._lines = []
        for at in self.firsts:
            line = sorted((second, s) for (first, second), s in points.items() if first == at)
            self._lines.append(([float(x) for x, _ in line], [s for _, s in line]))

    @classmethod
    def of(cls, points: Mapping[tuple[int, int], float] | None) -> Lines | None:
        """Return the lines through `points`, or None if there are too few points."""
        counts = Counter(first for first, _ in points or ())
        thin = [first for first, count in counts.items() if count < 2]
        return cls(points) if points and len(counts) > 1 and not thin else None

    def __call__(self, first: float, second: float) -> float:
        low = min(max(bisect_right(self.firsts, first) - 1, 0), len(self.firsts) - 2)
        share = (first - self.firsts[low]) / (self.firsts[low + 1] - self.firsts[low])
        below, above = self._at(low, second), self._at(low + 1, second)
        return below + share * (above - below)

    def _at(self, line: int, second: float) -> float:
        xs, seconds = self._lines[line]
        low = min(max(bisect_right(xs, second) - 1, 0), len(xs) - 2)
        slope_s = (seconds[low + 1] - seconds[low]) / (xs[low + 1] - xs[low])
        return seconds[low] + (second - xs[low]) * slope_s
