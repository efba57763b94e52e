"""How many tokens each slot drafts: pure functions of acceptance statistics.

The estimator is a decayed *ratio of sums* with decay per trial: a step with A accepted drafts and
R in {0, 1} rejected ones has d = A + R trials, and

    N <- rho^d N + A,   D <- rho^d D + d,   alpha = N / D

with the prior inside both sums. Positions after the first rejection were not trials. The mean of
A / k would be biased low and would depend on k (at alpha = 0.7, k = 4 it reads 0.44).

A slot's chance that its first j drafts all survive is the Beta moment

    S_j = prod_{m < j} (a + m) / (a + b + m),   a = N, b = D - N,

slightly above alpha^j while little is known, which keeps exploring.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.config import LookaheadConfig

MAX_DEPTH = 32
_DEPTHS = np.arange(MAX_DEPTH, dtype=np.float64)


def survival(
    accepted: np.ndarray, trials: np.ndarray, depth: int, odds: np.ndarray | None = None
) -> np.ndarray:
    """S_1..S_depth for each row, float64 [rows, depth], non-increasing along a row.

    `accepted` and `trials` are the decayed sums N and D, float64 [rows]. `odds`, float64 with one
    for each depth, multiply those of a draft there (`depths.DepthOdds`).
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


def choose_lookahead(
    config: LookaheadConfig, estimate: np.ndarray, rows: slice | np.ndarray, caps: np.ndarray
) -> np.ndarray:
    """k of each row, int32 [rows], before the step budget and the pool have their say.

    `estimate` is float64 [2, slots], the sums N and D, of which `rows` selects some; `caps` is
    int32 [rows], what request and context allow, at most `config.k`. `off` is 0, `fixed` the cap,
    `ema` drafts position j while S_j >= `config.min_survival`.
    """
    if config.policy == "off":
        return np.zeros(len(caps), dtype=np.int32)
    if config.policy == "fixed":
        return caps
    accepted, trials = estimate[:, rows]
    worth = survival(accepted, trials, config.k) >= config.min_survival
    drafts: np.ndarray = np.minimum(np.add.reduce(worth, axis=1, dtype=np.int32), caps)
    return drafts


def observe(
    config: LookaheadConfig,
    estimate: np.ndarray,
    num_drafted: np.ndarray,
    num_accepted: np.ndarray,
    evidence: np.ndarray | None = None,
) -> np.ndarray:
    """The sums N and D after a step, float64 [2, rows]; `num_*` are int32 [rows]. `evidence`, float
    [rows], takes the place of the accepted drafts in N (`plan.StepResult.expected_accepted`).

    A row that drafted nothing drifts towards the prior, so that k = 0 never absorbs a slot.
    """
    tried = num_accepted + (num_accepted < num_drafted)
    after: np.ndarray = estimate * np.power(config.decay, tried)
    after[0] += num_accepted if evidence is None else evidence
    after[1] += tried
    idle = num_drafted == 0
    if np.count_nonzero(idle):
        after[:, idle] = drift(config, estimate[:, idle])
    return after


def overhear(
    config: LookaheadConfig, estimate: np.ndarray, trials: np.ndarray, hits: np.ndarray
) -> np.ndarray:
    """The sums N and D, float64 [2, rows], with trials that nobody paid for: `hits` of `trials`,
    int32 [rows] each, would have been accepted (`plan.ShadowEvidence`)."""
    after: np.ndarray = estimate * np.power(config.decay, trials)
    after[0] += hits
    after[1] += trials
    return after


def drift(config: LookaheadConfig, estimate: np.ndarray) -> np.ndarray:
    """The sums N and D after a step without drafts: a little closer to the prior."""
    prior = config.prior_trials * np.array([[config.prior_acceptance], [1.0]])
    drifted: np.ndarray = config.idle_drift * estimate + (1 - config.idle_drift) * prior
    return drifted
