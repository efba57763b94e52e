"""A decision that stands for some steps, by slot.

In between verdicts are tallied, and one step of them teaches the prices. Deciding and learning take
up to a millisecond, between steps that leave the caches cold: a decision stands for as many steps
as make that a small share of their time.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.speculation.feedback import Rows

LEAST_STEPS, MOST_STEPS = 4, 16
_DECISION_S, _DECISION_SHARE = 1e-3, 0.03  # of steps without drafts


class CachedDecision:
    """k of each slot, for `steps` steps."""

    def __init__(self, max_slots: int) -> None:
        self._num_drafts = np.zeros(max_slots, dtype=np.int32)
        self._left_steps = self._budget_tokens = self._newcomers = self._deepest = 0
        self._threshold = np.inf
        self.steps = LEAST_STEPS

    def set(
        self,
        rows: Rows,
        num_drafts: np.ndarray | None,
        budget_tokens: int,
        threshold: float,
        plain_s: float,
    ) -> None:
        """`num_drafts` is k of each row, None where nobody drafts; `plain_s` what a step without
        drafts takes."""
        self._num_drafts[rows] = 0 if num_drafts is None else num_drafts
        worth = int(_DECISION_S / (_DECISION_SHARE * plain_s))
        self.steps = max(min(worth, 2 * self.steps, MOST_STEPS), LEAST_STEPS)
        self._left_steps, self._budget_tokens, self._newcomers = self.steps - 1, budget_tokens, 0
        self._deepest = 0 if num_drafts is None else int(np.maximum.reduce(num_drafts))
        self._threshold = threshold

    @property
    def pace(self) -> int:
        return self.steps // LEAST_STEPS

    @property
    def drafts(self) -> bool:
        return self._deepest > 0

    def enter(self, slot: int, survival: np.ndarray | None) -> None:
        """Who comes in between drafts as far as others with such chances, float64 [1, depth], did;
        None: nobody drafts."""
        worth = 0 if survival is None else int(np.count_nonzero(survival >= self._threshold))
        self._num_drafts[slot] = min(worth, self._deepest)
        self._newcomers += 1

    def get(self, rows: Rows, caps: np.ndarray, budget_tokens: int) -> np.ndarray | None:
        """k of each row, int32; None where it is time to decide anew."""
        other_load = not 3 * self._budget_tokens <= 4 * budget_tokens <= 5 * self._budget_tokens
        if self._left_steps <= 0 or other_load or 4 * self._newcomers >= len(caps):
            return None
        self._left_steps -= 1
        num_drafts: np.ndarray = np.minimum(self._num_drafts[rows], caps)
        return num_drafts if int(np.add.reduce(num_drafts)) <= budget_tokens else None
