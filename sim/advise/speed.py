"""The speed of the recorded machine at each time of the log, relative to the prices of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbatch.core.prices.step_work import StepSample
from sim.cost.base import CostModel

Span = tuple[float, float]  # start and end of a step, in seconds from the first arrival


class RecordedSpeed:
    """Between the start and the end of a recorded step, the machine does the work of the step's
    price; between steps it does a second's work in a second. A simulated step ends when the machine
    has done the work of its own price. So what slowed the recorded steps slows simulated steps at
    the same time. After the log a second's work takes a second."""

    def __init__(
        self, spans: Sequence[Span], samples: Sequence[StepSample], cost: CostModel
    ) -> None:
        prices_s = np.array([sum(cost.step_s(sample.work)) for sample in samples])
        times_s = np.maximum.accumulate(np.array(spans).ravel())
        work_s = np.diff(times_s, prepend=0.0)  # by interval: the time between steps, a step, ...
        work_s[1::2] = np.where(work_s[1::2] > 0, prices_s, 0.0)
        self._times_s, self._work_s = times_s, np.cumsum(work_s)

    def end_s(self, start_s: float, price_s: float) -> float:
        """Return the time at which a step of this price ends."""
        work_s = _interpolated(start_s, self._times_s, self._work_s) + price_s
        return max(_interpolated(work_s, self._work_s, self._times_s), start_s)


def _interpolated(x: float, xs: np.ndarray, ys: np.ndarray) -> float:
    """Return y at x by linear interpolation; outside `xs` y grows as x does."""
    inside = min(max(x, float(xs[0])), float(xs[-1]))
    return float(np.interp(inside, xs, ys)) + x - inside
