"""What a step costs, from its composition: the interface that every cost model answers.

A model is a pure function of `StepWork`. The executor asks it once a step and charges what it says;
a scheduler that learns prices (`goodput`) learns them from the same durations.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from cbatch.core.errors import FieldError

IDLE_LEFT = 0.1  # of what idleness took from caches, the share that a step does not bring back


class StepWork(msgspec.Struct, gc=False):
    """The composition of one step. Filled by the executor; read-only to a cost model.

    A decoding row reads all of its context and computes 1 + k tokens; a chunk of a prompt attends
    to what came before it and, on average, to half of itself.
    """

    rows: int = 0
    decode_rows: int = 0  # of these, the ones that decode or verify
    decode_tokens: int = 0  # 1 + k of each
    prefill_tokens: int = 0
    logit_tokens: int = 0  # tokens whose logits are wanted
    decode_context_tokens: int = 0  # KV positions that decoding rows read
    decode_longest_tokens: int = 0  # the most that one of them reads, and the least
    decode_shortest_tokens: int = 0
    decode_pairs: int = 0  # query-key pairs of decoding rows
    prefill_context_tokens: int = 0  # KV positions that chunks read, their own among them
    prefill_pairs: int = 0
    draft_depth: int = 0  # sequential passes of the drafter
    draft_tokens: int = 0
    draft_context_tokens: int = 0  # context of the rows that draft
    ingested_tokens: int = 0  # that the drafter catches up on
    admitted: int = 0  # requests that entered a slot
    steps_since_prefill: int = 0  # 0: this one computes a chunk
    idle_s: float = 0.0  # without work until this step; after each, `IDLE_LEFT` of it counts on

    def go_on(self) -> None:
        """One step later: rows that all decode one token read one position more."""
        self.decode_context_tokens = self.decode_pairs = self.decode_context_tokens + self.rows
        self.decode_longest_tokens += 1
        self.decode_shortest_tokens += 1
        self.steps_since_prefill += 1
        self.idle_s *= IDLE_LEFT


class CostModel(Protocol):
    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        """`draft_s`, `target_s` and `host_s`: seconds of the drafter's passes, of what else an
        executor measures, and of the loop around it."""


class ConstantCost(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every step, and for every pass of the drafter."""

    step_duration_s: float = 0.01
    draft_pass_s: float = 0.001

    def __post_init__(self) -> None:
        for field, value in (("step_duration_s", self.step_duration_s),):
            if not 0 < value < float("inf"):
                raise FieldError(field, f"{value!r} is not allowed", "give positive seconds")
        if not 0 <= self.draft_pass_s < float("inf"):
            raise FieldError(
                "draft_pass_s", f"{self.draft_pass_s!r} is not allowed", "give 0 or more seconds"
            )

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        return self.draft_pass_s * work.draft_depth, self.step_duration_s, 0.0


class LinearCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds linear in what a step does. The defaults are those of `sim.models.StepCost`, a small
    model on a CPU; a fit to measured steps has the same form."""

    base_s: float = 2e-3
    token_s: float = 1e-4  # of a target token: prefilled, decoded or verified
    context_token_s: float = 1e-7
    row_s: float = 1e-5
    request_s: float = 0.0  # of a request that enters
    draft_pass_s: float = 2e-4
    draft_token_s: float = 1e-5  # drafted or ingested

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        draft_tokens = work.draft_tokens + work.ingested_tokens
        context_tokens = work.decode_context_tokens + work.prefill_context_tokens
        return (
            self.draft_pass_s * work.draft_depth + self.draft_token_s * draft_tokens,
            self.base_s
            + self.token_s * (work.decode_tokens + work.prefill_tokens)
            + self.context_token_s * context_tokens
            + self.row_s * work.rows
            + self.request_s * work.admitted,
            0.0,
        )
