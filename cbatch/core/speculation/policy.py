"""The contract of a lookahead policy: its inputs, and the choice that it returns."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample
from cbatch.core.speculation.acceptance import Rows
from cbatch.core.speculation.config import LookaheadConfig


class PolicyLimits(msgspec.Struct, frozen=True):
    """Sizes of the engine, and the cost of its steps."""

    max_num_seqs: int
    max_tokens: int  # most tokens of a step through the target model
    # Prices of steps. A `priced` policy lets them observe the steps without chunks.
    costs: StepCosts = msgspec.field(default_factory=StepCosts)


class PlannedRows(Protocol):
    """The decoding rows of a step that is being planned. Properties are computed when read."""

    rows: Rows  # the slots of the rows
    num_rows: int

    @property
    def max_drafts(self) -> np.ndarray:
        """Most drafts that each row's request and context allow, int32 [rows]."""

    @property
    def draft_kv_lag(self) -> np.ndarray:
        """Tokens that the drafter's KV lacks, int32 [rows]."""

    @property
    def budget_tokens(self) -> int:
        """Most drafts and catch-up tokens of all rows together; a choice beyond it is cut."""

    @property
    def context_tokens(self) -> int:
        """Known tokens of all rows together."""

    @property
    def num_prompts(self) -> int:
        """Requests whose prompts are computed or could be: they wait while rows draft."""

    @property
    def remaining_tokens(self) -> np.ndarray:
        """Tokens that each row may still draft, int32 [rows]."""


class DraftedStep(Protocol):
    """A step that has committed. Arrays are int32 [rows]."""

    rows: Rows
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    evidence: np.ndarray | None  # float32, in place of `num_accepted`, see acceptance.py
    total_planned: int  # planned drafts; a lookup may find fewer
    total_drafted: int
    total_caught_up: int  # planned catch-up tokens of the drafter
    has_chunks: bool  # the step had chunks of prompts

    def sample(self) -> StepSample: ...


class SurvivalStats(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of drafts in the observed steps, by depth from 1. Accepted drafts survive."""

    drafted: list[float]
    predicted: list[float]  # expected number of survivors
    survived: list[float]


class PolicyStats(msgspec.Struct, frozen=True, array_like=True):
    """The last decision of `adaptive`. Its numbers are None while no row drafts."""

    drafting: bool
    threshold: float | None  # lambda, the smallest (weighted) survival of a chosen draft
    tokens_per_s: float | None  # expected
    gain: float | None  # `tokens_per_s` relative to no drafts, minus 1
    calibration: SurvivalStats


class LookaheadPolicy:
    """Base of all policies, and the policy `off`, which drafts nothing.

    `choose` is called for every plan, `observe` for every commit, `enter` and `leave` for slots.
    A policy has no other input, no clock and no randomness.
    """

    max_depth = 0  # the most drafts of a row
    priced = False  # whether the policy uses `limits.costs`
    stats: PolicyStats | None = None  # for metrics
    keeps_states = True  # whether hidden states are kept for draft heads, see `StepPlan`

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        """`config.k` is the number after the policy's name on the command line."""

    def enter(self, slot: int, policy_state: tuple[float, float] | None) -> None:
        """Assign the slot to a sequence. `policy_state`: what `leave` returned; None if new."""

    def leave(self, slot: int) -> tuple[float, float] | None:
        """Free the slot of a finished or preempted sequence. Return `policy_state` for `enter`."""
        return None

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        """Return k of each row, int32 [rows], at most its `max_drafts`, or None for no drafts."""
        return None

    def observe(self, step: DraftedStep) -> None:
        """Learn from the drafted and accepted tokens of a committed step."""

    def estimated_acceptance(self, slots: np.ndarray) -> list[float] | None:
        """Return the estimated acceptance of drafts in these slots, if there is one."""
        return None
