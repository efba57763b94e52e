"""Acceptance by depth: what the j-th draft of a step has that the estimate of its row does not say.

A row's N / D is over all its trials. First drafts are refused more often than that and later ones
less, where acceptance changes within a request: whoever got to depth j is in an easy stretch. A
drafter that loses its way does the opposite. Of drafts judged as blocks later ones stand more often
by themselves. Both are alike in all requests, so the correction is
the fleet's: a factor on the odds of the j-th draft, from drafts that were reached (Kaplan and Meier
1958: given that those before it were accepted), as often accepted as they were, over as often as
was expected of their rows. It starts at 1, and is left there while what is expected is the prior
that nobody has confirmed: that is for the estimates to correct.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.speculation import acceptance
from cbatch.core.speculation.stats import SurvivalStats

_MEMORY = 400.0  # drafts of a depth
_WEIGHT = 100.0  # drafts, half of them accepted, that stand for what is not known yet
_UNSETTLED = 128  # drafts until the estimates stand on their own
_MOST = 4.0  # bounds of a factor, and of its inverse
_COUNTED = 4  # one observation in so many is counted: the figures are for people


class DepthOdds:
    """`odds` float64 [depth] is for `acceptance.survival`."""

    def __init__(self, depth: int) -> None:
        self._depths = np.arange(depth, dtype=np.int32)[:, None]
        self._sums = np.zeros((3, depth))  # reached, accepted, expected
        self._unsettled = _UNSETTLED
        self.odds = np.ones(depth)
        self._observations = 0
        self._totals = np.zeros((3, depth))  # drafted, predicted to survive, survived

    def observe(
        self, estimate: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """A step of some rows: their N and D before it, float64 [2, rows], and what came of it,
        int32 [rows] each."""
        depths = self._depths
        if self._observations % _COUNTED == 0:
            self._count(estimate, num_drafted, num_accepted)
        self._observations += 1
        reached = (depths <= num_accepted) & (depths < num_drafted)
        if self._unsettled > 0:
            self._unsettled -= int(np.count_nonzero(reached))
            return
        accepted, trials = estimate
        hazards = (accepted + depths) / (trials + depths)
        count = np.add.reduce(reached, axis=1, dtype=np.float64)
        self._sums *= np.exp(count / -_MEMORY)
        self._sums[0] += count
        self._sums[1] += np.add.reduce(depths < num_accepted, axis=1)
        self._sums[2] += np.add.reduce(hazards * reached, axis=1)
        total, hits, expected = self._sums
        half = _WEIGHT / 2
        was = (hits + half) / (total - hits + half)
        thought = (expected + half) / (total - expected + half)
        self.odds = np.minimum(np.maximum(was / thought, 1 / _MOST), _MOST)

    @property
    def calibration(self) -> SurvivalStats:
        """Since the beginning."""
        return SurvivalStats(*self._totals.tolist())

    def _count(
        self, estimate: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        accepted, trials = estimate
        drafted = self._depths < num_drafted
        predicted = acceptance.survival(accepted, trials, len(self.odds), self.odds).T
        self._totals[0] += np.add.reduce(drafted, axis=1)
        self._totals[1] += np.add.reduce(predicted * drafted, axis=1)
        self._totals[2] += np.add.reduce(self._depths < num_accepted, axis=1)
