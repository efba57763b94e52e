"""The policies without prices: `fixed`, and `ema`, which goes by acceptance alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from cbatch.core.speculation.acceptance import decayed, drift, survival
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.feedback import Rows
from cbatch.core.speculation.gate import Due
from cbatch.core.speculation.policy import DraftedStep, LearningPolicy, LookaheadPolicy


class FixedPolicy(LookaheadPolicy):
    """The same k for every row that may."""

    def __init__(self, config: LookaheadConfig) -> None:
        self.max_depth = config.k

    def due(self, num_rows: int) -> Due:
        return Due.DECISION

    def choose(self, due: Due, rows: Rows, caps: np.ndarray, *_: Any) -> np.ndarray | None:
        return caps


class EmaPolicy(LearningPolicy):
    """Drafts position j of a row while S_j >= `config.min_survival`."""

    def __init__(self, config: LookaheadConfig, *, max_slots: int) -> None:
        self.max_depth = config.k
        self.prior = config.prior_acceptance * config.prior_trials, config.prior_trials
        self.estimate = np.zeros((2, max_slots))
        self._config = config

    def due(self, num_rows: int) -> Due:
        return Due.DECISION

    def choose(self, due: Due, rows: Rows, caps: np.ndarray, *_: Any) -> np.ndarray | None:
        accepted, trials = self.estimate[:, rows]
        worth = survival(accepted, trials, self.max_depth) >= self._config.min_survival
        drafts: np.ndarray = np.minimum(np.add.reduce(worth, axis=1, dtype=np.int32), caps)
        return drafts

    def observe(self, step: DraftedStep) -> None:
        """A row that drafted nothing drifts to the prior, so that k = 0 never absorbs a slot."""
        before = self.estimate[:, step.rows]
        after = drift(self._config, before, self.prior)
        if step.total_drafted:
            accepted = step.num_accepted
            tried = accepted + (accepted < step.num_drafted)
            gained = accepted if step.evidence is None else step.evidence
            moved = decayed(self._config, before, tried, gained)
            after = np.where(step.num_drafted > 0, moved, after)
        self.estimate[:, step.rows] = after

    def observe_shadow(self, slots: np.ndarray, trials: np.ndarray, hits: np.ndarray) -> None:
        self.estimate[:, slots] = decayed(self._config, self.estimate[:, slots], trials, hits)
