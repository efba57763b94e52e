"""What is known about the acceptance of drafts: per slot, and of the fleet.

The estimator is a decayed *ratio of sums* with decay per trial: a step with A accepted drafts and
R in {0, 1} rejected ones has d = A + R trials, and

    N <- rho^d N + A,   D <- rho^d D + d,   alpha = N / D

with the prior inside both sums. Positions after the first rejection were not trials. The mean of
A / k would be biased low and would depend on k (at alpha = 0.7, k = 4 it reads 0.44).

A slot's chance that its first j drafts all survive is the Beta moment

    S_j = prod_{m < j} (a + m) / (a + b + m),   a = N, b = D - N,

slightly above alpha^j while little is known, which keeps exploring.

`ema` needs no more. For `goodput` come to the sums N and D

- a test for a fast drop. Sums with decay 0.96 forget half of what they know in some 17 trials.
  Page's CUSUM (1954) of the log-likelihood ratio "acceptance has halved" notices earlier; then D is
  cut to a few trials at the same N / D, and what is seen next weighs more. A step's accepted drafts
  come before its rejection, so one update a step is the same as one a trial, at any k.
- optionally, smoother evidence than accepted or not: the sum of 1 - TV(p, q) over the positions up
  to and including the first rejection (`plan.StepResult.expected_accepted`). Its mean is that of
  the count (the difference is a martingale, the first rejection a stopping time), its variance
  lower. Later positions must not enter: their noise is used again by the next step. Of drafts
  judged as a block (`triton_kernels/verification/block_reference.py`) it is the chance that one
  more was accepted, given those before: a martingale just so. There S_j does not depend on k
  either, but S_j / S_{j-1} rises with j, which `depth_correction` learns and N / D does not show.
- a prior from earlier requests: moments of a Beta law fitted to their acceptance (empirical Bayes).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from cbatch.core.speculation.config import LookaheadConfig

# Rows of the statistics, float64 [NUM_STATISTICS, slots].
ACCEPTED, TRIALS = 0, 1  # the decayed sums N and D
DROP = 2  # the CUSUM
FRESH_ACCEPTED, FRESH_TRIALS = 3, 4  # evidence that the fleet has not been told of
IDLE_STEPS = 5  # since the last step in which the policy drafted for it
NUM_STATISTICS = 6

VOTE_TRIALS = 16.0  # the most that one request counts for
_LOG_2 = math.log(2.0)
_DEPTHS = np.arange(32, dtype=np.float64)
_BETA_TRIALS = (4.0, 16.0)  # bounds of the prior's weight
_BETA_MEAN = (0.02, 0.98)


def survival(
    accepted: np.ndarray, trials: np.ndarray, depth: int, odds: np.ndarray | None = None
) -> np.ndarray:
    """S_1..S_depth for each row, float64 [rows, depth], non-increasing along a row.

    `accepted` and `trials` are the decayed sums N and D, float64 [rows]. `odds`, float64 with one
    for each depth, multiply those of a draft there (`depth_correction.DepthOdds`).
    """
    steps = _DEPTHS[:depth, None]  # depth by depth in memory: numpy is fast along rows
    hazards: np.ndarray = accepted + steps
    if odds is None:
        hazards /= trials + steps
    else:
        hazards *= odds[:depth, None]
        hazards /= hazards + (trials - accepted)
    for shallower, deeper in zip(hazards, hazards[1:], strict=False):
        deeper *= shallower
    return hazards.T


def decayed(
    config: LookaheadConfig, estimate: np.ndarray, trials: np.ndarray, gained: np.ndarray
) -> np.ndarray:
    """N and D, float64 [2, rows], after so many trials each, int32 [rows], that gained so much."""
    after: np.ndarray = estimate * np.power(config.decay, trials)
    after[0] += gained
    after[1] += trials
    return after


class FleetPrior(msgspec.Struct, frozen=True):
    """Discounted moments of the acceptance of earlier requests, each a vote weighed by its trials.

    Votes are few trials long, so their spread is wider than that of the acceptance: for a beta law
    of weight n0, Var(A / t) = m (1 - m) (1 / t + r (1 - 1 / t)) with r = 1 / (n0 + 1). Votes made
    of 1 - TV spread less than that: the weight then errs upwards, as far as it may.
    """

    weight: float
    means: float  # sums over votes of weight * A / t
    squares: float  # ... of weight * (A / t)^2
    inverses: float  # ... of weight / t

    @classmethod
    def of(cls, config: LookaheadConfig) -> FleetPrior:
        """The configured prior, as strong as one long request."""
        mean, weight = config.prior_acceptance, VOTE_TRIALS
        variance = mean * (1 - mean) / (config.prior_trials + 1)
        return cls(weight, weight * mean, weight * (mean**2 + variance), 0.0)

    def sums(self) -> tuple[float, float]:
        """N and D that a new request starts with."""
        mean = min(max(self.means / self.weight, _BETA_MEAN[0]), _BETA_MEAN[1])
        spread = (self.squares / self.weight - mean**2) / (mean * (1 - mean))
        inverse = min(self.inverses / self.weight, 0.99)
        correlation = max((spread - inverse) / (1 - inverse), 1e-6)
        trials = min(max(1 / correlation - 1, _BETA_TRIALS[0]), _BETA_TRIALS[1])
        return mean * trials, trials

    def fold(self, accepted: np.ndarray, trials: np.ndarray, memory_trials: float) -> FleetPrior:
        """With the votes of some requests, float64 [n] each; those without trials do not count.
        A long request counts as `VOTE_TRIALS` trials, and old votes fade with `memory_trials`."""
        voted = trials > 0
        trials = trials[voted]
        if not len(trials):
            return self
        mean = accepted[voted] / trials
        weight = np.minimum(trials, VOTE_TRIALS)
        total = float(np.add.reduce(weight))
        kept = math.exp(-total / memory_trials)
        return FleetPrior(
            kept * self.weight + total,
            kept * self.means + float(weight @ mean),
            kept * self.squares + float(weight @ mean**2),
            kept * self.inverses + float(weight @ (1 / trials)),
        )


def observe(
    config: LookaheadConfig,
    statistics: np.ndarray,
    num_drafted: np.ndarray,
    num_accepted: np.ndarray,
    prior: tuple[float, float],
    evidence: np.ndarray | None = None,
) -> np.ndarray:
    """The statistics after a step, float64 [NUM_STATISTICS, rows], of those before it.

    `num_*` are int32 [rows]; `prior` is `FleetPrior.sums()`, to which a row without drafts drifts.
    `evidence`, float [rows], replaces the counts of accepted drafts: for each row the sum of
    1 - TV over its verified positions up to and including the first rejection.
    """
    rejected = num_accepted < num_drafted
    gained = num_accepted if evidence is None else evidence
    return update(config, statistics, num_accepted, rejected, gained, prior)


def update(
    config: LookaheadConfig,
    statistics: np.ndarray,
    num_accepted: np.ndarray,
    rejected: np.ndarray,
    gained: np.ndarray,
    prior: tuple[float, float],
    steps: int = 1,
) -> np.ndarray:
    """`observe` of some steps at once: by row, how many drafts were accepted, how often one was
    rejected, and the evidence for N."""
    tried = num_accepted + rejected
    after = statistics.copy()
    before = np.minimum(np.maximum(statistics[ACCEPTED] / statistics[TRIALS], 0.05), 0.98)
    after[:2] = decayed(config, statistics[:2], tried, gained)
    after[FRESH_ACCEPTED] += gained
    after[FRESH_TRIALS] += tried
    drop = np.maximum(after[DROP] - _LOG_2 * num_accepted, 0.0)
    drop += rejected * np.log((1 - before / 2) / (1 - before))
    after[DROP] = drop
    fell = (drop > config.drop_evidence).nonzero()[0]
    if len(fell):
        shrink = np.minimum(config.drop_trials / after[TRIALS, fell], 1.0)
        after[:2, fell] *= shrink
        after[DROP, fell] = 0.0
    idle = (tried == 0).nonzero()[0]
    if len(idle):
        after[:2, idle] = drift(config, after[:2, idle], prior, steps)
    return after


def drift(
    config: LookaheadConfig, estimate: np.ndarray, prior: tuple[float, float], steps: int = 1
) -> np.ndarray:
    """N and D, float64 [2, rows], after `steps` steps without drafts: closer to the prior."""
    kept = config.idle_drift**steps
    drifted: np.ndarray = kept * estimate + (1 - kept) * np.array(prior)[:, None]
    return drifted
