"""The policies without prices: `fixed`, and `ema`, which uses estimated acceptance alone."""

from __future__ import annotations

import numpy as np

from cbatch.core.speculation.acceptance import Rows, decayed, drift, survival
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import DraftedStep, LookaheadPolicy, PlannedRows, PolicyLimits


class FixedPolicy(LookaheadPolicy):
    """The same k for every row whose `max_drafts` allows it."""

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.max_depth = config.k

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        return step.max_drafts


class EstimatingPolicy(FixedPolicy):
    """Base of policies that estimate the acceptance of each slot."""

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        super().__init__(config, limits)
        self.config = config
        self.estimate = np.empty((2, limits.max_num_seqs))  # N and D, see acceptance.py
        self.estimate[:] = np.array(self.prior)[:, None]

    @property
    def prior(self) -> tuple[float, float]:
        """N and D of a request without history."""
        return self.config.prior_acceptance * self.config.prior_trials, self.config.prior_trials

    def enter(self, slot: int, policy_state: tuple[float, float] | None) -> None:
        self.estimate[:, slot] = self.prior if policy_state is None else policy_state

    def leave(self, slot: int) -> tuple[float, float] | None:
        accepted, trials = self.estimate[:, slot].tolist()
        return accepted, trials

    def estimated_acceptance(self, slots: np.ndarray) -> list[float] | None:
        accepted, trials = self.estimate[:, slots]
        acceptances: list[float] = (accepted / trials).tolist()
        return acceptances

    def learn(self, rows: Rows, trials: np.ndarray, accepted: np.ndarray) -> None:
        """Update the estimates of rows by `trials` trials, of which `accepted` were accepted."""
        decay = self.config.decay
        self.estimate[:, rows] = decayed(decay, self.estimate[:, rows], trials, accepted)

    def observe(self, step: DraftedStep) -> None:
        if step.total_drafted:
            trials = step.num_accepted + (step.num_accepted < step.num_drafted)
            evidence = step.num_accepted if step.evidence is None else step.evidence
            self.learn(step.rows, trials, evidence)


class EmaPolicy(EstimatingPolicy):
    """Drafts position j of a row while S_j >= `config.min_survival`."""

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        accepted, trials = self.estimate[:, step.rows]
        worth = survival(accepted, trials, self.max_depth) >= self.config.min_survival
        depths = np.add.reduce(worth, axis=1, dtype=np.int32)
        drafts: np.ndarray = np.minimum(depths, step.max_drafts)
        return drafts

    def observe(self, step: DraftedStep) -> None:
        """Also move rows without drafts towards the prior, so that no slot stays at k = 0."""
        before = self.estimate[:, step.rows]
        drifted = drift(self.config.idle_drift, before, np.array(self.prior))
        self.estimate[:, step.rows] = np.where(step.num_drafted > 0, before, drifted)
        super().observe(step)
