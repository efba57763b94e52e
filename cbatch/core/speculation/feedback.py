"""Verdicts of a few steps, summed up by slot: the estimator is told of them together.

Telling it costs some twenty array operations however few the rows are, and a decision that stands
for several steps has no use for news in between.
"""

from __future__ import annotations

import numpy as np

Rows = slice | np.ndarray  # selects slots


class AcceptanceFeedback:
    def __init__(self, max_slots: int) -> None:
        self._sums = np.zeros((3, max_slots))  # accepted, rejected, gained
        self._told = np.zeros(max_slots, dtype=np.bool_)
        self.steps = 0

    def add(
        self, rows: Rows, accepted: np.ndarray, rejected: np.ndarray, gained: np.ndarray
    ) -> None:
        """Of one step, by row: accepted drafts, whether one was rejected, evidence for N."""
        sums = self._sums
        sums[0, rows] += accepted
        sums[1, rows] += rejected
        sums[2, rows] += gained
        self._told[rows] = True
        self.steps += 1

    def take(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Slots, their sums, float64 [3, slots], and of how many steps."""
        slots = self._told.nonzero()[0]
        sums, steps = self._sums[:, slots], self.steps
        self._sums[:, slots] = 0.0
        self._told[slots] = False
        self.steps = 0
        return slots, sums, steps

    def drop(self, slot: int) -> tuple[float, float]:
        """Evidence and trials of a slot that is left."""
        if not self._told[slot]:
            return 0.0, 0.0
        accepted, rejected, gained = self._sums[:, slot].tolist()
        self._sums[:, slot] = 0.0
        self._told[slot] = False
        return gained, accepted + rejected
