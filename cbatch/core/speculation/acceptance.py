"""Estimates of the acceptance of drafts: of each slot, and of all slots together.

The estimator is a decayed *ratio of sums* with decay per trial: a step with A accepted drafts and
R in {0, 1} rejected ones has d = A + R trials, and

    N <- rho^d N + A,   D <- rho^d D + d,   alpha = N / D

where N and D begin as the prior. Positions after the first rejection are not trials. The mean of
A / k would be biased low and would depend on k (0.44 at alpha = 0.7, k = 4). The probability that
a slot's first j drafts are all accepted is estimated as the Beta moment

    S_j = prod_{m < j} (N + m) / (D + m),

slightly above alpha^j while D is small, so that slots with few trials keep drafting.

Instead of A a step may report smoother evidence (`plan.StepResult.expected_accepted`): 1 - TV(p, q)
summed up to the first rejection. Later drafts must not count: the next step reuses their noise.
"""

from __future__ import annotations

import math

import numpy as np

from cbatch.core.speculation.config import LookaheadConfig

Rows = slice | np.ndarray  # selects slots

# Trials over which the overall acceptance decays: while rows draft, and while no row drafts.
OVERALL_TRIALS, IDLE_TRIALS = 640.0, 160.0
MEMORY = 160.0  # drafts or steps over which the other averages decay
PRIOR_DRAFTS = 8.0  # weight of the initial value of each overall ratio, in drafts
_DEPTH_DECAY = 0.99  # of the ratios by depth, per observed step
_IDLE_FADE = 0.5  # while no row drafts, a decision removes this share of a ratio's distance to 1


def survival(accepted: np.ndarray, trials: np.ndarray, depth: int) -> np.ndarray:
    """Return S_1..S_depth of each row, float64 [rows, depth], non-increasing along a row, for the
    sums N and D, float64 [rows]."""
    steps = np.arange(float(depth))[:, None]  # m of the formula
    chances: np.ndarray = accepted + steps  # [depth, rows]: numpy is fast along rows
    chances /= trials + steps
    for shallower, deeper in zip(chances, chances[1:], strict=False):
        deeper *= shallower
    return chances.T


def decayed(
    decay: float, estimate: np.ndarray, trials: np.ndarray | float, accepted: np.ndarray | float
) -> np.ndarray:
    """Return N and D, float64 [2, ...], after more trials, of which `accepted` were accepted."""
    updated: np.ndarray = estimate * decay**trials
    updated[0] += accepted
    updated[1] += trials
    return updated


def drift(idle_drift: float, estimate: np.ndarray, prior: np.ndarray, steps: int = 1) -> np.ndarray:
    """Return N and D, float64 [2, ..., rows], after `steps` steps without drafts: closer to the
    prior, [2, ...]."""
    kept = idle_drift**steps
    drifted: np.ndarray = kept * estimate + (1 - kept) * prior[..., None]
    return drifted


class OverallAcceptance:
    """Decayed averages over all rows."""

    def __init__(self, config: LookaheadConfig) -> None:
        depth, self._prior_trials = config.k, config.prior_trials
        self._sums = config.prior_acceptance * self._prior_trials, self._prior_trials  # N and D
        self._delivered = PRIOR_DRAFTS, PRIOR_DRAFTS  # decayed sums of delivered and planned drafts
        self.caught_up = 0.0  # mean catch-up tokens of a step with drafts, beyond one per row
        self._depths = np.arange(depth, dtype=np.int32)[:, None]
        self._depth_prior = PRIOR_DRAFTS * config.prior_acceptance ** np.arange(depth)
        self._by_depth = np.tile(self._depth_prior, (2, 1))  # decayed sums: predicted, survived
        self.totals = np.zeros((3, depth))  # drafted, predicted to survive, survived

    @property
    def prior(self) -> tuple[float, float]:
        """N and D of a request without history: overall acceptance, with a small weight."""
        return self._prior_trials * self._sums[0] / self._sums[1], self._prior_trials

    def observe(self, accepted: float, trials: float, memory_trials: float) -> None:
        kept = math.exp(-trials / memory_trials)
        self._sums = kept * self._sums[0] + accepted, kept * self._sums[1] + trials

    def observe_drafter(self, planned: int, drafted: int, caught_up: int) -> None:
        """Learn from a step's planned and delivered drafts, and its catch-up tokens."""
        kept = math.exp(-planned / MEMORY)
        self._delivered = kept * self._delivered[0] + drafted, kept * self._delivered[1] + planned
        self.caught_up += (caught_up - self.caught_up) / MEMORY

    @property
    def delivered_share(self) -> float:
        """Share of the planned drafts that the drafter delivers: a lookup often has none."""
        return min(self._delivered[0] / self._delivered[1], 1.0)

    def corrected(self, survival: np.ndarray, *, falling: bool = True) -> np.ndarray:
        """Return `survival`, float64 [depth, rows], times the ratio of survived to predicted drafts
        at each depth; made non-increasing if `falling`. S_j is too high for a lookup's first draft,
        which fails where a repetition ends, and too low for its later drafts."""
        predicted, survived = self._by_depth[:, : len(survival)]
        chances: np.ndarray = np.minimum(survival * (survived / predicted)[:, None], 1.0)
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
        self._by_depth -= (1 - _DEPTH_DECAY) * (self._by_depth - self._depth_prior)
        self._by_depth += np.add.reduce(survival * drafted, axis=1), survived

    def fade(self) -> None:
        """Move the ratios by depth towards 1: a wrong ratio must not prevent drafts forever."""
        self._by_depth[1] += _IDLE_FADE * (self._by_depth[0] - self._by_depth[1])
