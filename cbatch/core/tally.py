"""Verdicts of a few steps, summed up by slot: the estimator is told of them together.

Telling it costs some twenty array operations however few the rows are, and a decision that stands
for several steps has no use for news in between.
"""

from __future__ import annotations

import numpy as np

Rows = slice | np.ndarray


def same_rows(a: Rows, b: Rows) -> bool:
    """Whether both select the same slots, as far as can be told for nothing."""
    return a is b or (isinstance(a, slice) and isinstance(b, slice) and a == b)


class Tally:
    def __init__(self, max_slots: int) -> None:
        self._sums = np.zeros((3, max_slots))
        self.rows: Rows | None = None  # None: empty
        self.steps = 0

    def add(
        self, rows: Rows, accepted: np.ndarray, rejected: np.ndarray, gained: np.ndarray
    ) -> None:
        """By row of one step; `rows` as in the steps before."""
        sums = self._sums
        if self.rows is None:
            self.rows = rows
            sums[0, rows], sums[1, rows], sums[2, rows] = accepted, rejected, gained
        else:
            sums[0, rows] += accepted
            sums[1, rows] += rejected
            sums[2, rows] += gained
        self.steps += 1

    def take(self) -> tuple[Rows, np.ndarray, int]:
        """Rows, their sums (accepted, rejected, gained), float64 [3, rows], and how many steps;
        there must be some."""
        rows, steps = self.rows, self.steps
        assert rows is not None
        self.rows, self.steps = None, 0
        return rows, self._sums[:, rows], steps
