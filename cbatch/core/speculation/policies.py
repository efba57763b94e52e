"""The policies without prices: `fixed`, and `ema`, which goes by acceptance alone."""

from __future__ import annotations

import numpy as np

from cbatch.core.speculation.acceptance import decayed, drift, survival
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import (
    DraftedStep,
    LearningPolicy,
    LookaheadPolicy,
    PlannedRows,
    PolicyLimits,
)


class FixedPolicy(LookaheadPolicy):
    """The same k for every row that may."""

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.max_depth = config.k

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        return step.caps


class EmaPolicy(LearningPolicy):
    """Drafts position j of a row while S_j >= `config.min_survival`."""

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.max_depth = config.k
        self.prior = config.prior_acceptance * config.prior_trials, config.prior_trials
        self.estimate = np.zeros((2, limits.max_slots))
        self._config = config

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        accepted, trials = self.estimate[:, step.rows]
        worth = survival(accepted, trials, self.max_depth) >= self._config.min_survival
        drafts: np.ndarray = np.minimum(np.add.reduce(worth, axis=1, dtype=np.int32), step.caps)
        return drafts

    def observe(self, step: DraftedStep) -> None:
        """A row that drafted nothing drifts to the prior, so that k = 0 never absorbs a slot."""
        before = self.estimate[:, step.rows]
        after = drift(self._config.idle_drift, before, np.array(self.prior))
        if step.total_drafted:
            accepted = step.num_accepted
            tried = accepted + (accepted < step.num_drafted)
            gained = accepted if step.evidence is None else step.evidence
            moved = decayed(self._config.decay, before, tried, gained)
            after = np.where(step.num_drafted > 0, moved, after)
        self.estimate[:, step.rows] = after
        if step.shadow is not None:
            slots, trials, hits = step.shadow
            before = self.estimate[:, slots]
            self.estimate[:, slots] = decayed(self._config.decay, before, trials, hits)
