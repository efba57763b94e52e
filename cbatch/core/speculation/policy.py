"""The contract of a lookahead policy: who drafts how many tokens, and what it is told in return."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.speculation.acceptance import Rows
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.stats import Outlook


class PolicyLimits(msgspec.Struct, frozen=True):
    """What a policy is made for. `max_tokens` are the most target tokens of a step; `profile` is
    what steps cost, for a policy that is `priced`, if it is known."""

    max_slots: int
    max_tokens: int
    profile: CostProfile | None = None


class StepBudget(msgspec.Struct, frozen=True):
    """What a step has for drafts besides money."""

    context_tokens: int  # sum over the rows
    left_tokens: np.ndarray | None = None  # int32 [rows], of the request; None: many


class PlannedRows(Protocol):
    """The decoding rows of a step that is being planned. What is asked for is worked out then."""

    rows: Rows  # their slots
    num_rows: int

    @property
    def caps(self) -> np.ndarray:
        """The most drafts that request and context allow, int32 [rows]."""

    @property
    def lag(self) -> np.ndarray:
        """How many tokens the drafter's KV is behind, int32 [rows]."""

    @property
    def budget_tokens(self) -> int:
        """The most drafts of all rows: who does not look at it is cut down."""

    def room(self) -> StepBudget: ...


class Shadow(NamedTuple):
    """What drafters that did not draft would have scored (`plan.ShadowEvidence`)."""

    slots: np.ndarray
    trials: np.ndarray
    hits: np.ndarray


class DraftedStep(Protocol):
    """A step that has committed. Arrays are int32 [rows]."""

    rows: Rows
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    evidence: np.ndarray | None  # float32, see `acceptance.observe`
    total_planned: int  # drafts that were asked for: a lookup need not have so many
    total_drafted: int
    total_caught_up: int  # tokens that the drafter took in besides
    has_chunks: bool  # of prompts, too
    shadow: Shadow | None

    def sample(self) -> StepSample: ...


class LookaheadPolicy:
    """This one is `off`: nobody drafts. The others override what they need.

    `choose` in every plan, `observe` in every commit, `enter` and `leave` with slots. A policy has
    no clock and no randomness: its inputs are these calls.
    """

    max_depth = 0  # no row is ever asked for more
    priced = False  # whether it is to be given a profile
    outlook: Outlook | None = None  # what it goes by, for whoever watches

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        """`config.k` is what was asked for on the command line behind the policy's name."""

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        """A sequence takes the slot, with what `leave` gave when it was preempted, if it was."""

    def leave(self, slot: int) -> tuple[float, float] | None:
        """It leaves the slot, finished or preempted. Returns what to remember of it."""
        return None

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        """k of each decoding row, int32 [rows] and at most its cap, or None if nobody drafts."""
        return None

    def observe(self, step: DraftedStep) -> None:
        """What was drafted and accepted in a step that has committed."""

    def estimated_acceptance(self, slots: np.ndarray) -> list[float] | None:
        """What is believed of the drafts of these slots; None: nothing is."""
        return None


class LearningPolicy(LookaheadPolicy):
    """What those have in common that go by acceptance."""

    prior: tuple[float, float]  # N and D of a request without history, see acceptance.py
    estimate: np.ndarray  # float64 [2, slots], the same of each slot

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        self.estimate[:, slot] = self.prior if carried is None else carried

    def leave(self, slot: int) -> tuple[float, float] | None:
        accepted, trials = self.estimate[:, slot].tolist()
        return accepted, trials

    def estimated_acceptance(self, slots: np.ndarray) -> list[float] | None:
        accepted, trials = self.estimate[:, slots]
        found: list[float] = (accepted / trials).tolist()
        return found
