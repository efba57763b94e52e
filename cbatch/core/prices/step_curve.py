"""The duration of a step as a curve over its number of tokens, learned from measured steps.

A point of the curve is the mean of recent measurements near its count. The only assumption is that
the curve never falls: a point is lowered to a lower point of larger count, if that point has at
least as many measurements. Other work on the machine only makes steps longer. So a duration far
above the expected duration is clipped, and a duration far below it replaces the point.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import accumulate

import numpy as np

_POINTS = 2  # points per doubling of the count
MEMORY_STEPS = 24.0  # steps that a point averages over
_SURPRISE = 1.5  # largest plausible ratio of a duration to the expected one, or its inverse
_UNTRIED = 0.1  # least slope beyond the last point, as a share of that point's seconds per token
_LEAST_S = 1e-9  # least estimate in seconds, also without measurements
_SLOPE_MEMORY = 0.99  # decay per step of the sums that determine the slope


class StepCurve:
    """Seconds of a step by its count (at least 1) and its context (`slope_s` seconds per unit)."""

    def __init__(self, max_count: int, *, fits_slope: bool = False) -> None:
        """`fits_slope`: learn `slope_s` from steps of similar counts and different contexts."""
        self._max_count, size = max_count, 1 + self._nearest(max_count)
        self._seen = [0.0] * size  # steps that each point averages over
        self._points = [(0.0, 0.0, 0.0)] * size  # means of count, seconds and context
        self.known: list[int] = []  # indices of points with a measurement, ascending
        self.slope_s = 0.0
        self._fits_slope = fits_slope
        # Decayed sums of squared context deviations, and of their products with seconds deviations.
        self._squares = self._products = 0.0

    @staticmethod
    def _nearest(count: float) -> int:
        return int(_POINTS * math.log2(count) + 0.5)

    def observe(self, count: float, seconds: float, context: float) -> None:
        at = self._nearest(count)
        seen, (x, y, z) = self._seen[at], self._points[at]
        if seen:
            expected_s = max(y + self.slope_s * (context - z), _LEAST_S)
            if seconds < expected_s / _SURPRISE:
                seen = 0.0
            if seen >= 1:
                seconds = min(seconds, _SURPRISE * expected_s)
            if seen and self._fits_slope:
                self._fit_slope(seconds - y, context - z)
        else:
            insort(self.known, at)
        self._seen[at] = seen = min(seen + 1, MEMORY_STEPS)
        self._points[at] = (
            x + (count - x) / seen,
            y + (seconds - y) / seen,
            z + (context - z) / seen,
        )

    def _fit_slope(self, more_s: float, more_context: float) -> None:
        """Update the least-squares slope by a step's deviations from the means of its point."""
        self._squares = _SLOPE_MEMORY * self._squares + more_context**2
        self._products = _SLOPE_MEMORY * self._products + more_context * more_s
        if self._squares:
            self.slope_s = max(self._products / self._squares, 0.0)

    def num_seen_about(self, count: float) -> float:
        """Return the most steps that the point of `count`, or a point next to it, averages over."""
        at = self._nearest(count)
        return max(self._seen[max(at - 1, 0) : at + 2])

    @property
    def least(self) -> float:
        """The least count that was measured; 0 if none was."""
        return self._points[self.known[0]][0] if self.known else 0.0

    def hold_weakly(self) -> None:
        """Reduce the weight of each point's measurements so far to half a step."""
        self._seen = [min(seen, 0.5) for seen in self._seen]

    def over(self, counts: np.ndarray | int, context: float) -> np.ndarray:
        """Return the seconds, float64, of steps of `counts` tokens at this context."""
        seconds = np.interp(counts, *self._levels(context)) if self.known else 0.0 * counts
        return np.maximum(seconds, _LEAST_S)

    def usual_s(self, count: int) -> float:
        """Return the seconds of a step of `count` tokens at the context of similar steps."""
        nearest = min(self.known, key=lambda at: abs(at - self._nearest(count)))
        return float(self.over(count, self._points[nearest][2]))

    def _levels(self, context: float) -> tuple[list[float], list[float]]:
        """Return the curve's points at a context: ascending counts, and non-decreasing seconds."""
        lowest_s, often, counts, levels_s = math.inf, 0.0, [], []
        for at in reversed(self.known):
            count, seconds, about = self._points[at]
            level_s = seconds + self.slope_s * (context - about)
            if level_s <= lowest_s or self._seen[at] > often:
                lowest_s, often = level_s, self._seen[at]
            counts.append(count)
            levels_s.append(lowest_s)
        counts.reverse()
        levels_s = list(accumulate(reversed(levels_s), max))
        last, before = counts[-1], bisect_right(counts, counts[-1] / 2) - 1
        if last < self._max_count:  # continue with the slope over the last doubling
            slope_s = _UNTRIED * levels_s[-1] / last
            if before >= 0:
                slope_s = max(slope_s, (levels_s[-1] - levels_s[before]) / (last - counts[before]))
            counts.append(self._max_count)
            levels_s.append(levels_s[-1] + slope_s * (self._max_count - last))
        return counts, levels_s
