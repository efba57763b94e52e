"""The duration of a step as a curve over its number of tokens, learned from measured steps.

A point of the curve is the mean of recent measurements near its count. The only assumption is that
the curve never falls: a point is lowered to a lower point of larger count, if that point has no
fewer measurements. Other work on the machine only makes steps longer. So a duration far above the
expected duration is clipped, and a duration far below it replaces the point.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import accumulate

import numpy as np

_POINTS_PER_DOUBLING = 2  # of the count
MEMORY_STEPS = 24.0  # steps that a point averages over
_MAX_RATIO = 1.5  # largest plausible ratio of a duration to the expected one, or its inverse
_MIN_SLOPE_SHARE = 0.1  # least slope beyond the last point, relative to its seconds per token
_MIN_STEP_S = 1e-9  # smallest estimate in seconds, also without measurements
_SLOPE_MEMORY = 0.99  # decay per step of the sums that determine the slope


class StepCurve:
    """Seconds of a step by its tokens (at least 1) and its context (`slope_s` seconds per unit)."""

    def __init__(self, max_count: int, *, fits_slope: bool = False) -> None:
        """`fits_slope`: learn `slope_s` from steps of similar counts and different contexts."""
        self._max_count, size = max_count, 1 + self._nearest(max_count)
        self._num_steps = [0.0] * size  # steps that each point averages over
        self._points = [(0.0, 0.0, 0.0)] * size  # means of count, seconds and context
        self.known: list[int] = []  # indices of points with a measurement, ascending
        self.slope_s = 0.0
        self._fits_slope = fits_slope
        # Decayed sums of squared context deviations, and of their products with seconds deviations.
        self._squares = self._products = 0.0

    @staticmethod
    def _nearest(count: float) -> int:
        return int(_POINTS_PER_DOUBLING * math.log2(count) + 0.5)

    def observe(self, count: float, seconds: float, context: float) -> None:
        at = self._nearest(count)
        num_steps, (x, y, z) = self._num_steps[at], self._points[at]
        if num_steps:
            expected_s = max(y + self.slope_s * (context - z), _MIN_STEP_S)
            if seconds < expected_s / _MAX_RATIO:
                num_steps = 0.0
            if num_steps >= 1:
                seconds = min(seconds, _MAX_RATIO * expected_s)
            if num_steps and self._fits_slope:
                self._fit_slope(seconds - y, context - z)
        else:
            insort(self.known, at)
        self._num_steps[at] = num_steps = min(num_steps + 1, MEMORY_STEPS)
        self._points[at] = (
            x + (count - x) / num_steps,
            y + (seconds - y) / num_steps,
            z + (context - z) / num_steps,
        )

    def _fit_slope(self, more_s: float, more_context: float) -> None:
        """Update the least-squares slope by a step's deviations from the means of its point."""
        self._squares = _SLOPE_MEMORY * self._squares + more_context**2
        self._products = _SLOPE_MEMORY * self._products + more_context * more_s
        if self._squares:
            self.slope_s = max(self._products / self._squares, 0.0)

    def num_steps_near(self, count: float) -> float:
        """Return the number of steps averaged near `count`: the highest of three points."""
        at = self._nearest(count)
        return max(self._num_steps[max(at - 1, 0) : at + 2])

    @property
    def min_count(self) -> float:
        """The least count that was measured; 0 if none was."""
        return self._points[self.known[0]][0] if self.known else 0.0

    def reduce_weights(self) -> None:
        """Reduce the weight of each point's measurements so far to half a step."""
        self._num_steps = [min(num_steps, 0.5) for num_steps in self._num_steps]

    def seconds_at(self, counts: np.ndarray | int, context: float) -> np.ndarray:
        """Return the seconds, float64, of steps of `counts` tokens at this context."""
        seconds = np.interp(counts, *self._levels(context)) if self.known else 0.0 * counts
        return np.maximum(seconds, _MIN_STEP_S)

    def typical_s(self, count: int) -> float:
        """Return the seconds of a step of `count` tokens at the context of similar steps."""
        nearest = min(self.known, key=lambda at: abs(at - self._nearest(count)))
        return float(self.seconds_at(count, self._points[nearest][2]))

    def _levels(self, context: float) -> tuple[list[float], list[float]]:
        lowest_s, max_steps, counts, levels_s = math.inf, 0.0, [], []
        for at in reversed(self.known):
            count, seconds, about = self._points[at]
            level_s = seconds + self.slope_s * (context - about)
            if level_s <= lowest_s or self._num_steps[at] > max_steps:
                lowest_s, max_steps = level_s, self._num_steps[at]
            counts.append(count)
            levels_s.append(lowest_s)
        counts.reverse()
        levels_s = list(accumulate(reversed(levels_s), max))
        last, before = counts[-1], bisect_right(counts, counts[-1] / 2) - 1
        if last < self._max_count:  # continue with the slope over the last doubling
            slope_s = _MIN_SLOPE_SHARE * levels_s[-1] / last
            if before >= 0:
                slope_s = max(slope_s, (levels_s[-1] - levels_s[before]) / (last - counts[before]))
            counts.append(self._max_count)
            levels_s.append(levels_s[-1] + slope_s * (self._max_count - last))
        return counts, levels_s
