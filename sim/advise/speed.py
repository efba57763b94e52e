"""The speed of the recorded machine at each time of the log, relative to the prices of steps."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from msgspec.structs import replace

from cbatch.core.prices.step_work import StepSample
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.steplog.recorded_run import Span
from sim.cost.base import CostModel
from sim.executor.fake import FakeExecutor


class RecordedSpeed:
    """Between the start and the end of a recorded step, the machine does the work of the step's
    price; between steps it does a second's work in a second. A simulated step ends when the machine
    has done the work of its own price. So what slowed the recorded steps slows simulated steps at
    the same time. After the log a second's work takes a second."""

    def __init__(
        self, spans: Sequence[Span], samples: Sequence[StepSample], cost: CostModel
    ) -> None:
        prices_s = np.array([sum(cost.step_s(sample.work)) for sample in samples])
        self._times_s = np.maximum.accumulate(np.array(spans).ravel())
        intervals_s = np.diff(self._times_s, prepend=0.0)  # between steps, a step, between, ...
        self._between_s, self._steps_s = intervals_s[::2], intervals_s[1::2]
        timed = self._steps_s > 0
        self._speeds = np.divide(prices_s, self._steps_s, out=np.zeros_like(prices_s), where=timed)
        self._work_s = self._cumulated(self._speeds)

    def _cumulated(self, speeds: np.ndarray) -> np.ndarray:
        works_s = np.stack([self._between_s, speeds * self._steps_s], axis=1)
        return np.cumsum(works_s.ravel())

    def shifted(self, share: float) -> RecordedSpeed:
        """Return the speed of a machine that is slow at other times: later by a share of the
        steps."""
        other = copy(self)
        other._work_s = self._cumulated(np.roll(self._speeds, int(share * len(self._speeds))))
        return other

    def end_s(self, start_s: float, price_s: float) -> float:
        """Return the time at which a step of this price ends."""
        work_s = _interpolated(start_s, self._times_s, self._work_s) + price_s
        return max(_interpolated(work_s, self._work_s, self._times_s), start_s)


def _interpolated(x: float, xs: np.ndarray, ys: np.ndarray) -> float:
    """Return y at x by linear interpolation; outside `xs` y grows as x does."""
    inside = min(max(x, float(xs[0])), float(xs[-1]))
    return float(np.interp(inside, xs, ys)) + x - inside


class PacedExecutor(FakeExecutor):
    """A fake executor that is as slow at each time as the recorded machine was."""

    def __init__(self, speed: RecordedSpeed, **parts: Any) -> None:
        super().__init__(**parts)
        self._speed, self._now_s = speed, 0.0

    def idle(self, seconds: float) -> None:
        super().idle(seconds)
        self._now_s += seconds

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        price_s = result.draft_s + result.target_s + self.host_s
        step_s = self._speed.end_s(self._now_s, price_s) - self._now_s
        self._now_s += step_s
        factor = step_s / price_s
        self.host_s *= factor
        return replace(result, draft_s=factor * result.draft_s, target_s=factor * result.target_s)
