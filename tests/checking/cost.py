"""A cost of steps to which every part of the work contributes."""

from __future__ import annotations

import msgspec

from cbatch.core.prices.step_work import StepWork


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
