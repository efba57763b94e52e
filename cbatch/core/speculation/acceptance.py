"""Estimates of the acceptance of drafts, by slot and of all slots together (the fleet).

The estimator is a decayed *ratio of sums* with decay per trial: a step with A accepted drafts and
R in {0, 1} rejected ones has d = A + R trials, and

    N <- rho^d N + A,   D <- rho^d D + d,   alpha = N / D

where N and D begin as the prior. Positions after the first rejection were not trials. The mean of
A / k would be biased low and would depend on k (0.44 at alpha = 0.7, k = 4). A slot's chance that
its first j drafts are all accepted is the Beta moment

    S_j = prod_{m < j} (N + m) / (D + m),

slightly above alpha^j while little is known, so that little-known slots keep drafting.

Instead of A a step may report smoother evidence (`plan.StepResult.expected_accepted`): 1 - TV(p, q)
summed up to the first rejection. Later positions must not count: their noise is used again.
"""

from __future__ import annotations

import math

import numpy as np

from cbatch.core.speculation.config import LookaheadConfig

Rows = slice | np.ndarray  # selects slots

# Memory of the fleet's prior, in trials: while rows draft, and while no row drafts.
FLEET_TRIALS, IDLE_TRIALS = 640.0, 160.0
RECENT = 160.0  # memory of the other averages, in drafts or steps
DOUBT = 8.0  # weight of the initial value in each ratio of the fleet, in drafts
_DEPTH_MEMORY = 0.99  # decay of the ratios by depth, per observed step
_IDLE_FADE = 0.5  # part of the ratios' way to 1 that a decision moves them while no row drafts


def survival(accepted: np.ndarray, trials: np.ndarray, depth: int) -> np.ndarray:
    """Return S_1..S_depth of each row, float64 [rows, depth], non-increasing along a row, for the
    sums N and D, float64 [rows]."""
    tried = np.arange(float(depth))[:, None]
    hazards: np.ndarray = accepted + tried  # [depth, rows]: numpy is fast along rows
    hazards /= trials + tried
    for shallower, deeper in zip(hazards, hazards[1:], strict=False):
        deeper *= shallower
    return hazards.T


def decayed(
    decay: float, estimate: np.ndarray, trials: np.ndarray | float, gained: np.ndarray | float
) -> np.ndarray:
    """Return N and D, float64 [2, ...], after `trials` trials, of which `gained` were accepted."""
    after: np.ndarray = estimate * decay**trials
    after[0] += gained
    after[1] += trials
    return after


def drift(idle_drift: float, estimate: np.ndarray, prior: np.ndarray, steps: int = 1) -> np.ndarray:
    """Return N and D, float64 [2, ..., rows], after `steps` steps without drafts: closer to the
    prior, [2, ...]."""
    kept = idle_drift**steps
    drifted: np.ndarray = kept * estimate + (1 - kept) * prior[..., None]
    return drifted


class Fleet:
    """Decayed averages over all rows."""

    def __init__(self, config: LookaheadConfig) -> None:
        depth, self._weight = config.k, config.prior_trials
        self._sums = config.prior_acceptance * self._weight, self._weight
        self._answered = DOUBT, DOUBT  # decayed sums of drafts that came, and of planned drafts
        self.caught_up = 0.0  # mean catch-up tokens of a step with drafts, beyond one per row
        self._depths = np.arange(depth, dtype=np.int32)[:, None]
        self._doubt = DOUBT * config.prior_acceptance ** np.arange(depth)
        self._by_depth = np.tile(self._doubt, (2, 1))  # drafts expected to survive, and survivors
        self.totals = np.zeros((3, depth))  # drafted, predicted to survive, survived

    @property
    def prior(self) -> tuple[float, float]:
        """N and D of a request without history: the fleet's acceptance, with a small weight."""
        return self._weight * self._sums[0] / self._sums[1], self._weight

    def observe(self, accepted: float, trials: float, memory_trials: float) -> None:
        kept = math.exp(-trials / memory_trials)
        self._sums = kept * self._sums[0] + accepted, kept * self._sums[1] + trials

    def observe_drafter(self, planned: int, drafted: int, caught_up: int) -> None:
        """Learn from a step's planned drafts, the drafts that came, and its catch-up tokens."""
        kept = math.exp(-planned / RECENT)
        self._answered = kept * self._answered[0] + drafted, kept * self._answered[1] + planned
        self.caught_up += (caught_up - self.caught_up) / RECENT

    @property
    def answered(self) -> float:
        """Share of the planned drafts that come: a lookup often has no draft."""
        return min(self._answered[0] / self._answered[1], 1.0)

    def corrected(self, survival: np.ndarray, *, falling: bool = True) -> np.ndarray:
        """Return `survival`, float64 [depth, rows], times the ratio of survived to expected drafts
        at each depth; non-increasing if `falling`. S_j is too high for the first draft of a lookup,
        which fails where a repetition ends, and too low for its later drafts."""
        expected, survived = self._by_depth[:, : len(survival)]
        chances: np.ndarray = np.minimum(survival * (survived / expected)[:, None], 1.0)
        return np.minimum.accumulate(chances, axis=0) if falling else chances

    def observe_depths(
        self, survival: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """Learn from a step: its drafts, int32 [rows] each, and the uncorrected `survival`, [depth,
        rows], that was estimated before it."""
        drafted = self._depths < num_drafted
        survived = np.add.reduce(self._depths < num_accepted, axis=1)
        predicted = np.add.reduce(self.corrected(survival, falling=False) * drafted, axis=1)
        self.totals += np.add.reduce(drafted, axis=1), predicted, survived
        self._by_depth -= (1 - _DEPTH_MEMORY) * (self._by_depth - self._doubt)
        self._by_depth += np.add.reduce(survival * drafted, axis=1), survived

    def fade(self) -> None:
        """Move the ratios by depth towards 1, so that no mistake lasts while no row drafts."""
        self._by_depth[1] += _IDLE_FADE * (self._by_depth[0] - self._by_depth[1])
