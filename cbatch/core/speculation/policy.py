"""The contract of a lookahead policy: who drafts how many tokens, and what it is told in return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from cbatch.core.speculation.feedback import Rows
from cbatch.core.speculation.gate import Due
from cbatch.core.speculation.stats import Outlook
from cbatch.core.speculation.step_work import StepSample


class StepBudget(msgspec.Struct, frozen=True):
    """What a step has for drafts besides money."""

    base_tokens: int  # target tokens without drafts: one a decoding row, and prompt chunks
    context_tokens: int  # sum over the rows
    left_tokens: np.ndarray | None = None  # int32 [rows], of the request; None: many
    # Where the pool is short: positions that each row can draft within its blocks, int32 [rows],
    # and free positions in the pool.
    blocks: tuple[np.ndarray, int] | None = None


class DraftedStep(Protocol):
    """A step that has committed, as a policy sees it. Arrays are int32 [rows]."""

    rows: Rows
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    evidence: np.ndarray | None  # float32, see `acceptance.observe`
    total_drafted: int

    def sample(self) -> StepSample: ...


class LookaheadPolicy:
    """This one is `off`: nobody drafts. The others override what they need.

    In every plan `due`, and `choose` unless nothing is; in every commit `observe`; `enter` and
    `leave` with slots. A policy has no clock and no randomness: its inputs are these calls.
    """

    max_depth = 0  # no row is ever asked for more
    outlook: Outlook | None = None  # what it goes by, for whoever watches

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        """A sequence takes the slot, with what `leave` gave when it was preempted, if it was."""

    def leave(self, slot: int) -> tuple[float, float] | None:
        """It leaves the slot, finished or preempted. Returns what to remember of it."""
        return None

    def due(self, num_rows: int) -> Due:
        """What this plan, of that many decoding rows, asks of `choose`; once a plan."""
        return Due.NOTHING

    def choose(
        self,
        due: Due,
        rows: Rows,
        caps: np.ndarray,
        lag: np.ndarray,
        budget_tokens: int,
        room: Callable[[], StepBudget],
    ) -> np.ndarray | None:
        """k of each decoding row, int32 [rows], or None if nobody drafts.

        `rows` selects slots; `caps` is int32 [rows], what request and context allow; `lag` int32
        [rows], how many tokens the drafter's KV is behind. At most `budget_tokens` are drafted: a
        policy that does not look at it is cut down. `room` is for who prices drafts.
        """
        return None

    def observe(self, step: DraftedStep) -> None:
        """What was drafted and accepted in a step that has committed."""

    def observe_shadow(self, slots: np.ndarray, trials: np.ndarray, hits: np.ndarray) -> None:
        """What drafters that did not draft would have scored (`plan.ShadowEvidence`)."""

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
