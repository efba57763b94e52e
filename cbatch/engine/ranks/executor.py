"""Rank 0's executor: hands every plan on to the other ranks, and runs it with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.engine.ranks.group import Ranks
from cbatch.engine.ranks.messages import Reset, digest

if TYPE_CHECKING:
    from cbatch.runtime.cpu.executor import TorchExecutor


class RankedExecutor:
    """Every rank runs the same plan, and samples the same tokens from the same logits and noise; so
    plans alone go out. That they did is checked in every step. Any fault is the end of all ranks:
    `run` and `reset` raise `RanksLostError` from then on."""

    def __init__(self, own: TorchExecutor, ranks: Ranks) -> None:
        self.own, self.ranks = own, ranks

    def run(self, plan: StepPlan) -> StepResult:
        with self.ranks.together(plan):
            result = self.own.run(plan)
            self.ranks.hear(digest(result))
        return result

    def reset(self) -> None:
        with self.ranks.together(Reset()):
            self.own.reset()

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """As the own executor's: where another rank stands still, so does this one."""
        self.own.report_progress(counter)
