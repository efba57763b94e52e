"""What a step costs, from its composition: the interface that every cost model answers.

A model is a pure function of `StepWork`. The executor asks it once a step and charges what it says;
a scheduler that learns prices (`goodput`) learns them from the same durations.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError


class CostModel(Protocol):
    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        """`draft_s`, `target_s` and `host_s`: seconds of the drafter's passes, of what else an
        executor measures, and of the loop around it."""


class ConstantCost(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every step, and for every pass of the drafter."""

    step_duration_s: float = 0.01
    draft_pass_s: float = 0.001

    def __post_init__(self) -> None:
        for field, value, ok, remedy in (
            ("step_duration_s", self.step_duration_s, self.step_duration_s > 0, "positive"),
            ("draft_pass_s", self.draft_pass_s, self.draft_pass_s >= 0, "0 or more"),
        ):
            if not (ok and value < float("inf")):
                raise FieldError(field, f"{value!r} is not allowed", f"give {remedy} seconds")

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        return self.draft_pass_s * work.draft_depth, self.step_duration_s, 0.0
