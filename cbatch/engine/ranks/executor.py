"""Rank 0's executor: it sends every plan to the other ranks and runs it with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbatch.core.scheduler.executor import WatchedExecutor
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.engine.ranks.group import Ranks
from cbatch.engine.ranks.messages import Reset, digest


class RankedExecutor:
    """Runs plans on all ranks. They sample the same tokens from the same logits and noise, so only
    plans are sent; every step compares the ranks' results. After any fault all ranks end, and `run`
    and `reset` raise `RanksLostError`."""

    def __init__(self, rank0_executor: WatchedExecutor, ranks: Ranks) -> None:
        self.rank0_executor, self.ranks = rank0_executor, ranks
        self.check = rank0_executor.check

    def run(self, plan: StepPlan) -> StepResult:
        with self.ranks.on_all_ranks(plan):
            result = self.rank0_executor.run(plan)
            self.ranks.expect_answer(digest(result))
        return result

    def reset(self) -> None:
        with self.ranks.on_all_ranks(Reset()):
            self.rank0_executor.reset()

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Count this rank's progress. If another rank hangs, this rank hangs in the same pass."""
        self.rank0_executor.report_progress(counter)
