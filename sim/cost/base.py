"""What a step costs, from its composition: the interface of every cost model.

A model is a pure function of `StepWork`. The executor asks it once a step and charges what it says;
a lookahead policy that learns prices learns them from the same durations.
"""

from __future__ import annotations

from typing import Protocol

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepWork
from cbatch.core.prices.terms import ProfiledCost


class CostModel(Protocol):
    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        """Return `draft_s`, `target_s` and `host_s`: seconds of the drafter's passes, of what else
        an executor measures, and of the loop around it."""


def constant_cost(step_s: float = 0.01, draft_pass_s: float = 0.001) -> ProfiledCost:
    """Return the cost model in which every step takes the same, and every pass of the drafter."""
    return ProfiledCost(CostProfile((1, 2), (step_s, step_s), draft_pass_s=draft_pass_s))
