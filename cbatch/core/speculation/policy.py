"""The contract of a lookahead policy: its inputs, and the choice that it returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.speculation.acceptance import Rows
from cbatch.core.speculation.config import LookaheadConfig


class PolicyLimits(msgspec.Struct, frozen=True):
    """Sizes of the engine, and the cost of its steps."""

    max_num_seqs: int
    max_tokens: int  # of the target, in a step
    profile: CostProfile | None = None  # for a `priced` policy, if it is known


class PlannedRows(Protocol):
    """The decoding rows of a step that is being planned. Properties are computed when read."""

    rows: Rows  # their slots
    num_rows: int

    @property
    def max_drafts(self) -> np.ndarray:
        """The most drafts that request and context allow, int32 [rows]."""

    @property
    def draft_kv_lag(self) -> np.ndarray:
        """Tokens that the drafter's KV lacks, int32 [rows]."""

    @property
    def budget_tokens(self) -> int:
        """The most drafts of all rows: a choice of more is cut."""

    @property
    def context_tokens(self) -> int:
        """Known tokens of all rows together."""

    @property
    def remaining_tokens(self) -> np.ndarray:
        """Tokens that each row may still draft, int32 [rows]."""


class Shadow(NamedTuple):
    """Scores of drafters that did not draft (`plan.ShadowEvidence`), by row."""

    slots: np.ndarray
    trials: np.ndarray
    hits: np.ndarray


class DraftedStep(Protocol):
    """A step that has committed. Arrays are int32 [rows]."""

    rows: Rows
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    evidence: np.ndarray | None  # float32, in place of `num_accepted`, see acceptance.py
    total_planned: int  # drafts; a lookup may have fewer
    total_drafted: int
    total_caught_up: int  # further tokens that the drafter read
    has_chunks: bool  # tokens of prompts, too
    shadow: Shadow | None

    def sample(self) -> StepSample: ...


class SurvivalStats(msgspec.Struct, frozen=True, array_like=True):
    """Drafts by depth, from the first, in the steps that were observed."""

    drafted: list[float]
    predicted: list[float]  # to survive
    survived: list[float]


class PolicyStats(msgspec.Struct, frozen=True, array_like=True):
    """The last decision of `adaptive`. Its numbers are None while no row drafts."""

    drafting: bool
    threshold: float | None  # lambda, the least (weighted) chance of survival worth a draft
    tokens_per_s: float | None  # expected
    gain: float | None  # of that over no drafts, less 1
    calibration: SurvivalStats


class LookaheadPolicy:
    """This one is `off`: it drafts nothing. The others override what they need.

    `choose` is called in every plan, `observe` in every commit, `enter` and `leave` with slots.
    These calls are all of a policy's inputs: it has no clock and no randomness.
    """

    max_depth = 0  # the most drafts of a row
    priced = False  # whether `limits.profile` is wanted
    stats: PolicyStats | None = None  # for metrics

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        """`config.k` is the number after the policy's name on the command line."""

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        """Assign the slot to a sequence, with what `leave` returned if it was preempted."""

    def leave(self, slot: int) -> tuple[float, float] | None:
        """Free the slot of a finished or preempted sequence. Return what to remember of it."""
        return None

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        """Return k of each row, int32 [rows], at most its `max_drafts`, or None for no drafts."""
        return None

    def observe(self, step: DraftedStep) -> None:
        """Take in what was drafted and accepted in a step that has committed."""

    def estimated_acceptance(self, slots: np.ndarray) -> list[float] | None:
        """Return the estimated acceptance of drafts in these slots, if there is one."""
        return None
