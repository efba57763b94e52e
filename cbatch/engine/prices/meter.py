"""An executor wrapper that measures steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cbatch.core.prices.step_work import StepSample
from cbatch.core.scheduler.executor import Executor
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.slot_counts import SlotCounts


class StepMeter:
    """An executor that runs steps on another executor, and keeps the sample of the last step."""

    def __init__(
        self, executor: Executor, max_num_seqs: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._executor, self._clock = executor, clock
        self.check = executor.check
        self._counts = SlotCounts(max_num_seqs)
        self.last: StepSample
        self.overhead_s = 0.0  # overhead of the meter in the last step, in seconds

    def run(self, plan: StepPlan) -> StepResult:
        result = self._executor.run(plan)
        started_s = self._clock()
        for admission in plan.deltas.new_sequences:
            self._counts.admit(admission)
        work = self._counts.work(plan, result.num_drafted)
        self._counts.advance(plan, result.num_accepted, np.diff(result.row_splits))
        self.last = StepSample(work, result.draft_s, result.target_s)
        self.overhead_s = self._clock() - started_s
        return result

    def reset(self) -> None:
        self._executor.reset()
