"""The interface of cost models: the time of a step, computed from its composition.

A cost model is a pure function of `StepWork`. The executor calls it once per step and reports the
result as the step's duration. A lookahead policy that learns prices learns them from these
durations.
"""

from __future__ import annotations

from typing import Protocol

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepWork


class CostModel(Protocol):
    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        """Return `draft_s`, `target_s` and `host_s`, in seconds: the drafter's passes, everything
        else that an executor measures, and the host work of the loop around the executor."""


def constant_cost(step_s: float = 0.01, draft_pass_s: float = 0.001) -> CostProfile:
    """Return a cost model in which every step takes `step_s` and every draft pass
    `draft_pass_s`."""
    return CostProfile(step_s, draft_pass_s=draft_pass_s)
