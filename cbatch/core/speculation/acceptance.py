"""What is known about the acceptance of drafts, by slot and of the fleet.

The estimator is a decayed *ratio of sums* with decay per trial: a step with A accepted drafts and
R in {0, 1} rejected ones has d = A + R trials, and

    N <- rho^d N + A,   D <- rho^d D + d,   alpha = N / D

with the prior inside both sums. Positions after the first rejection were not trials. The mean of
A / k would be biased low and would depend on k (at alpha = 0.7, k = 4 it reads 0.44). A slot's
chance that its first j drafts all survive is the Beta moment

    S_j = prod_{m < j} (N + m) / (D + m),

slightly above alpha^j while little is known, which keeps exploring.

`ema` needs no more. `goodput` adds

- a prior with the mean of the fleet's latest trials.
- optionally, smoother evidence than accepted or not: the sum of 1 - TV(p, q) over the positions up
  to and including the first rejection (`plan.StepResult.expected_accepted`). Its mean is that of
  the count (the difference is a martingale, the first rejection a stopping time), its variance
  lower. Later positions must not enter: their noise is used again by the next step. Of drafts
  judged as a block (`cbatch/runtime/sampling/block_verification.py`) it is the chance that one
  more was accepted, given those before: a martingale just so.
- a correction by depth. S_j knows no depth: drafts of a block are accepted more often the deeper
  they lie, a drafter may lose its way, and a lookup's first draft fails where the text leaves what
  it repeats, while the ones behind it mostly stand: N / D, of all trials, is too high for a first
  draft then. What survived over what was expected is the fleet's, since it is alike in all
  requests. While nobody drafts it fades: a mistake would keep everybody from drafting for ever.
"""

from __future__ import annotations

import math

import numpy as np

from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.stats import SurvivalStats

Rows = slice | np.ndarray  # selects slots

FLEET_TRIALS = 640.0  # memory of the prior's mean: some forty requests, so that a few that are
# hard to guess do not keep everybody from drafting
LATEST_TRIALS = 160.0  # the same while nobody drafts, and little is heard
_DEPTH_MEMORY = 0.99  # of the correction by depth, a step that is looked at
_IDLE_FADE = 0.5  # of that, a decision while nobody drafts
DOUBT = 8.0  # drafts, gone as foretold, that stand for what is not known yet


def survival(accepted: np.ndarray, trials: np.ndarray, depth: int) -> np.ndarray:
    """S_1..S_depth for each row, float64 [rows, depth], non-increasing along a row.

    `accepted` and `trials` are the decayed sums N and D, float64 [rows].
    """
    tried = np.arange(float(depth))[:, None]
    hazards: np.ndarray = accepted + tried  # [depth, rows]: numpy is fast along rows
    hazards /= trials + tried
    for shallower, deeper in zip(hazards, hazards[1:], strict=False):
        deeper *= shallower
    return hazards.T


def decayed(
    decay: float, estimate: np.ndarray, trials: np.ndarray | float, gained: np.ndarray | float
) -> np.ndarray:
    """N and D, float64 [2, ...], after so many trials each, [...], that gained so much."""
    after: np.ndarray = estimate * decay**trials
    after[0] += gained
    after[1] += trials
    return after


def drift(idle_drift: float, estimate: np.ndarray, prior: np.ndarray, steps: int = 1) -> np.ndarray:
    """N and D, float64 [2, ..., rows], after `steps` steps without drafts: closer to the prior,
    [2, ...]."""
    kept = idle_drift**steps
    drifted: np.ndarray = kept * estimate + (1 - kept) * prior[..., None]
    return drifted


class FleetPrior:
    """N and D of a request without history: the mean of the fleet's latest trials, weakly held."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._weight = config.prior_trials
        self._sums = config.prior_acceptance * self._weight, self._weight

    def observe(self, accepted: float, trials: float, memory_trials: float) -> None:
        kept = math.exp(-trials / memory_trials)
        self._sums = kept * self._sums[0] + accepted, kept * self._sums[1] + trials

    def sums(self) -> tuple[float, float]:
        return self._weight * self._sums[0] / self._sums[1], self._weight


class Tally:
    """Verdicts of the steps since the last decision, by slot: the estimator is told of them
    together, since that costs as much for one step as for many."""

    def __init__(self, max_slots: int) -> None:
        self._sums = np.zeros((2, max_slots))  # evidence for N, trials
        self._steps: list[tuple[Rows, np.ndarray, np.ndarray, np.ndarray | None]] = []

    def add(
        self, rows: Rows, drafted: np.ndarray, accepted: np.ndarray, evidence: np.ndarray | None
    ) -> None:
        """Of one step, by row. None: what was accepted is the evidence."""
        self._steps.append((rows, drafted, accepted, evidence))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Evidence and trials, float64 [slots] each."""
        self._sum_up()
        (gained, trials), self._sums = self._sums, np.zeros_like(self._sums)
        return gained, trials

    def take_slot(self, slot: int) -> tuple[float, float]:
        """The same of one slot."""
        self._sum_up()
        gained, trials = self._sums[:, slot].tolist()
        self._sums[:, slot] = 0.0
        return gained, trials

    def _sum_up(self) -> None:
        gained, trials = self._sums
        for rows, drafted, accepted, evidence in self._steps:
            gained[rows] += accepted if evidence is None else evidence
            trials[rows] += accepted
            trials[rows] += accepted < drafted
        self._steps = []


class DepthCorrection:
    """How much more often, or less, drafts of a depth survive than their rows' N / D says."""

    def __init__(self, config: LookaheadConfig, max_slots: int) -> None:
        depth = config.k
        self._depths = np.arange(depth, dtype=np.int32)[:, None]
        self._expected = np.zeros((2, depth, max_slots))  # S of the last decision, and corrected
        self._totals = np.zeros((3, depth))  # drafted, predicted to survive, survived
        self._doubt = DOUBT * config.prior_acceptance ** np.arange(depth)
        self._sums = np.tile(self._doubt, (2, 1))  # expected to survive, survived; decayed

    def corrected(self, rows: Rows, survival: np.ndarray) -> np.ndarray:
        """Float64 [depth, rows], as is `survival`, never rising. (Of the drafts that come those at
        a depth may stand more often than those before: a lookup has many where it is sure.)"""
        depth = len(survival)
        by_depth = self._sums[1, :depth] / self._sums[0, :depth]
        found = survival * by_depth[:, None]
        np.minimum(found, 1.0, out=found)
        self._expected[0][:depth, rows] = survival
        self._expected[1][:depth, rows] = found
        return np.minimum.accumulate(found, axis=0)

    def observe(self, rows: Rows, num_drafted: np.ndarray, num_accepted: np.ndarray) -> None:
        """A step behind a decision, int32 [rows] each."""
        drafted = self._depths < num_drafted
        survived = np.add.reduce(self._depths < num_accepted, axis=1)
        expected, predicted = np.add.reduce(self._expected[:, :, rows] * drafted, axis=2)
        self._totals += np.add.reduce(drafted, axis=1), predicted, survived
        self._sums -= (1 - _DEPTH_MEMORY) * (self._sums - self._doubt)
        self._sums += expected, survived

    def fade(self) -> None:
        """While nobody drafts: what was seen holds less and less."""
        expected, survived = self._sums
        survived += _IDLE_FADE * (expected - survived)

    @property
    def calibration(self) -> SurvivalStats:
        """Since the beginning."""
        return SurvivalStats(*self._totals.tolist())
