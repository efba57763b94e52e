"""A curve of seconds over a count of tokens, through points that follow what steps took.

Points lie a few to a doubling of the count, each a mean of what was measured lately about there.
Nothing is assumed of the curve but that it does not fall. Other work on the machine only makes
steps longer: of a duration far above the expected one a part is believed, one far below replaces
the point, and no point lies above a point to its right that was seen as often.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import accumulate

import numpy as np

_POINTS = 2  # per doubling
MEMORY_STEPS = 24.0  # of a point
_SURPRISE = 1.5  # ratio to the expected duration, or its inverse: a stall, or news
_UNTRIED = 0.1  # least price of a token past the last point, as a share of the mean price there
_LEAST_S = 1e-9  # duration of a step while nothing is known
_SLOPE_MEMORY = 0.99  # weight of the past after one more step, in the fit of the slope


class StepCurve:
    """Seconds over a count of at least 1, plus `slope_s` times the context of the step."""

    def __init__(self, most: int, *, fits_slope: bool = False) -> None:
        """`most`: the largest count. `fits_slope`: learn `slope_s` from steps of one count."""
        self._most, size = most, 1 + self._nearest(most)
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

    def hold_weakly(self) -> None:
        """Count every measurement so far as one step."""
        self._seen = [min(seen, 1.0) for seen in self._seen]

    def over(self, counts: np.ndarray | int, context: float) -> np.ndarray:
        """Return the seconds, float64, of steps of `counts` tokens and of `context`."""
        seconds = np.interp(counts, *self._levels(context)) if self.known else 0.0 * counts
        return np.maximum(seconds, _LEAST_S)

    def usual_s(self, count: int) -> float:
        """Return the seconds of a step of `count` tokens, with the context of steps about it."""
        nearest = min(self.known, key=lambda at: abs(at - self._nearest(count)))
        return float(self.over(count, self._points[nearest][2]))

    def _levels(self, context: float) -> tuple[list[float], list[float]]:
        """Return counts, ascending to the most there can be, and seconds that never fall."""
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
        if last < self._most:  # on as it rose over the last doubling
            slope_s = _UNTRIED * levels_s[-1] / last
            if before >= 0:
                slope_s = max(slope_s, (levels_s[-1] - levels_s[before]) / (last - counts[before]))
            counts.append(self._most)
            levels_s.append(levels_s[-1] + slope_s * (self._most - last))
        return counts, levels_s
