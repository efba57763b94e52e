"""A curve of seconds over a count of tokens, through points that follow what steps took.

Points lie a few to a doubling of the count. Each is a mean of recent measurements near its count.
The curve is only assumed never to fall. Other work on the machine only makes steps longer.
So a duration far above the expected one counts in part, and one far below replaces the point. A
point above one to its right that was seen as often is lowered to it.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import accumulate

import numpy as np

_POINTS = 2  # per doubling
MEMORY_STEPS = 24.0  # steps that a point averages over
_SURPRISE = 1.5  # ratio to the expected duration, or its inverse: a stall, or news
_UNTRIED = 0.1  # least price of a token past the last point, as a share of the mean price there
_LEAST_S = 1e-9  # duration of a step while nothing is known
_SLOPE_MEMORY = 0.99  # weight of the past after one more step, in the fit of the slope


class StepCurve:
    """Seconds over a count of at least 1, plus `slope_s` times the context of the step."""

    def __init__(self, max_count: int, *, fits_slope: bool = False) -> None:
        """`fits_slope`: learn `slope_s` from steps of one count."""
        self._max_count, size = max_count, 1 + self._nearest(max_count)
        self._seen = [0.0] * size  # steps that a point remembers
        self._points = [(0.0, 0.0, 0.0)] * size  # means of count, seconds and context
        self.known: list[int] = []  # points with a measurement, ascending
        self.slope_s = 0.0
        self._fits_slope = fits_slope
        self._squares = self._products = 0.0  # of context, and with seconds, about their means

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
        """Least squares within points, whose means follow at the rate of their memory."""
        self._squares = _SLOPE_MEMORY * self._squares + more_context**2
        self._products = _SLOPE_MEMORY * self._products + more_context * more_s
        if self._squares:
            self.slope_s = max(self._products / self._squares, 0.0)

    def num_seen_about(self, count: float) -> float:
        """Return the steps that the point of `count`, or a point next to it, remembers."""
        at = self._nearest(count)
        return max(self._seen[max(at - 1, 0) : at + 2])

    @property
    def least(self) -> float:
        """The least count that was measured; 0 if none was."""
        return self._points[self.known[0]][0] if self.known else 0.0

    def hold_weakly(self) -> None:
        """Count the measurements so far as half a step."""
        self._seen = [min(seen, 0.5) for seen in self._seen]

    def over(self, counts: np.ndarray | int, context: float) -> np.ndarray:
        """Return the seconds, float64, of steps of `counts` tokens and of `context`."""
        seconds = np.interp(counts, *self._levels(context)) if self.known else 0.0 * counts
        return np.maximum(seconds, _LEAST_S)

    def usual_s(self, count: int) -> float:
        """Return the seconds of a step of `count` tokens, with the context of steps about it."""
        nearest = min(self.known, key=lambda at: abs(at - self._nearest(count)))
        return float(self.over(count, self._points[nearest][2]))

    def _levels(self, context: float) -> tuple[list[float], list[float]]:
        """Return counts, ascending to the largest, and seconds that never fall."""
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
        if last < self._max_count:  # on as it rose over the last doubling
            slope_s = _UNTRIED * levels_s[-1] / last
            if before >= 0:
                slope_s = max(slope_s, (levels_s[-1] - levels_s[before]) / (last - counts[before]))
            counts.append(self._max_count)
            levels_s.append(levels_s[-1] + slope_s * (self._max_count - last))
        return counts, levels_s
