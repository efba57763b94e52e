"""What a step costs, from its composition: the interface that every cost model answers.

A model is a pure function of `StepWork`. The executor asks it once a step and charges what it says;
a scheduler that learns prices (`goodput`) learns them from the same durations.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.step_work import StepWork


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


class LinearCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds linear in what a step does. The defaults resemble a small model on a CPU."""

    base_s: float = 2e-3
    token_s: float = 1e-4  # of a target token: prefilled, decoded or verified
    context_token_s: float = 1e-7
    row_s: float = 1e-5
    draft_pass_s: float = 2e-4
    draft_token_s: float = 1e-5  # drafted or ingested

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        draft_tokens = work.draft_tokens + work.ingested_tokens
        return (
            self.draft_pass_s * work.draft_depth + self.draft_token_s * draft_tokens,
            self.base_s
            + self.token_s * work.target_tokens
            + self.context_token_s * work.context_tokens
            + self.row_s * work.rows,
            0.0,
        )
