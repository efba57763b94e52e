"""The `adaptive` policy: it chooses each row's k to commit the most tokens per second at this load.

A decision (draft_allocation.py) uses estimates of acceptance (acceptance.py) and prices of steps
(cost_model.py). It holds for some steps, or until a quarter of the batch has changed.

The policy either drafts or does not. Experiments keep the price of the other mode up to date: steps
without drafts while rows draft, or one draft per step while no row drafts. The policy learns from
the second half of an experiment, because the first steps find caches as the previous mode left
them. An experiment is longer if its steps lose less time. The next experiment waits until its
expected loss is a small share of the time since the last experiment.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.cost_model import OWED_TOKENS, OnlineCostModel, StepPrices
from cbatch.core.speculation import acceptance
from cbatch.core.speculation.acceptance import Fleet, Rows, survival
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.draft_allocation import LookaheadDecision, decide
from cbatch.core.speculation.policies import LearningPolicy
from cbatch.core.speculation.policy import (
    DraftedStep,
    PlannedRows,
    PolicyLimits,
    PolicyStats,
    SurvivalStats,
)

# Steps from one decision to the next: after a change, while rows draft, while no row drafts.
SOON_STEPS, DECISION_STEPS, IDLE_STEPS = 4, 16, 256
# Least and most steps of an experiment. It has the most if each step loses at most `_LEAST_LOSS`.
LEAST_STEPS, MOST_STEPS = 4, 64
_LEAST_LOSS = 0.02  # least loss assumed for a step of an experiment, as a share of its time
# Share of time that experiments may lose: while rows draft, while no row drafts.
_EXPERIMENTS, _IDLE_EXPERIMENTS = 0.01, 0.005


class AdaptivePolicy(LearningPolicy):
    priced = True

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.costs = OnlineCostModel(limits.profile, max_tokens=limits.max_tokens)
        self.fleet = Fleet(config)
        super().__init__(config, limits)
        self.drafting = True
        self.decision = LookaheadDecision(np.zeros(0, np.int32))
        self._gain = 0.0  # gain of drafting, averaged over the decisions since the last switch
        self._num_drafts = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._newcomer_drafts = 0  # k of a row that enters, until the next decision
        self._steps = 0  # calls of `choose`
        self._decided_at = self._decide_at = 0  # steps of the last decision and of the next
        self._newcomers = 0  # rows that entered since the last decision
        self._experiment = range(0)  # steps of the latest experiment

    @property
    def prior(self) -> tuple[float, float]:
        return self.fleet.prior

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        # While no row drafts, experiments find out whether rows without history should draft.
        self._newcomers += self.drafting or carried is not None
        self._num_drafts[slot] = self._newcomer_drafts
        super().enter(slot, carried)

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        self._steps += 1
        if self._steps not in self._experiment and (
            self._steps >= self._decide_at or self._has_changed(step.num_rows)
        ):
            self._decide(step)
        if self._steps in self._experiment:
            return None if self.drafting else self._single_draft(step)
        if not self.drafting:
            return None
        num_drafts: np.ndarray = np.minimum(self._num_drafts[step.rows], step.max_drafts)
        return num_drafts

    def observe(self, step: DraftedStep) -> None:
        teaches = self._teaches()
        if teaches and self.drafting and step.total_drafted:
            accepted, trials = self.estimate[:, step.rows]
            chances = survival(accepted, trials, self.max_depth).T
            self.fleet.observe_depths(chances, step.num_drafted, step.num_accepted)
        if step.shadow is not None and not self.drafting:
            gained, trials = float(step.shadow.hits.sum()), float(step.shadow.trials.sum())
            if gained * self.prior[1] > 2 * trials * self.prior[0]:  # twice the prior acceptance
                self._decide_at = min(self._decide_at, self._steps + SOON_STEPS)
        super().observe(step)
        if step.total_planned:
            caught_up = max(step.total_caught_up - len(step.num_drafted), 0)  # beyond one per row
            self.fleet.observe_drafter(step.total_planned, step.total_drafted, caught_up)
        if teaches:
            self.costs.observe(step.sample())

    def learn(self, rows: Rows, trials: np.ndarray, gained: np.ndarray) -> None:
        super().learn(rows, trials, gained)
        memory = acceptance.FLEET_TRIALS if self.drafting else acceptance.IDLE_TRIALS
        self.fleet.observe(float(np.add.reduce(gained)), float(np.add.reduce(trials)), memory)

    @property
    def stats(self) -> PolicyStats:  # type: ignore[override]
        decision, totals = self.decision, SurvivalStats(*self.fleet.totals.tolist())
        if decision.tokens_per_s is None or not self.drafting:
            return PolicyStats(self.drafting, None, None, None, totals)
        return PolicyStats(True, decision.threshold, decision.tokens_per_s, decision.gain, totals)

    def _has_changed(self, num_rows: int) -> bool:
        """Return whether a quarter of the batch is new or gone since the last decision."""
        before = len(self.decision.num_drafts)
        if abs(num_rows - before) > max(before // 4, 1):
            return True
        is_due = self._steps - self._decided_at >= SOON_STEPS
        return is_due and 4 * self._newcomers >= max(num_rows, 1)

    def _teaches(self) -> bool:
        """Return whether prices are learned from this step. A step with a decision, and the steps
        right after it, take longer and do not count."""
        if self._steps in self._experiment:
            return 2 * self._steps >= self._experiment.start + self._experiment.stop
        interval = SOON_STEPS if self.drafting else DECISION_STEPS
        return (
            self._steps - self._decided_at
        ) % interval == SOON_STEPS - 1 or not self.costs.is_known

    def _decide(self, step: PlannedRows) -> None:
        self._drift()
        self._decided_at, self._newcomers = self._steps, 0
        self._decide_at = self._steps + SOON_STEPS
        depth = int(np.maximum.reduce(step.max_drafts, initial=0))
        max_total = min(step.budget_tokens, depth * step.num_rows)
        if max_total <= 0 or not self.costs.is_known:
            self.decision = LookaheadDecision(np.zeros(step.num_rows, np.int32))
            self._num_drafts[step.rows] = 0
            return
        prices = self.costs.prices(step.num_rows, step.context_tokens, max_total)
        decision, was_drafting = self._best(step, prices, depth), self.drafting
        self.drafting = decision.gain > (0.0 if was_drafting else self.config.switch_gain)
        self.decision = decision
        self._num_drafts[step.rows] = decision.num_drafts if self.drafting else 0
        # A new row drafts as many tokens as the median row.
        self._newcomer_drafts = 0
        if self.drafting:
            self._newcomer_drafts = int(np.sort(decision.num_drafts)[step.num_rows // 2])
        if self.drafting != was_drafting:
            self._gain, self._experiment = decision.gain, range(self._steps, self._steps)
        else:
            self._gain += (decision.gain - self._gain) / SOON_STEPS
            self._plan_experiment(step, prices)

    def _drift(self) -> None:
        """Move rows that had no drafts since the last decision towards the prior."""
        idle = (self._num_drafts == 0).nonzero()[0] if self.drafting else slice(None)
        steps, prior = self._steps - self._decided_at, np.array(self.prior)
        before = self.estimate[:, idle]
        self.estimate[:, idle] = acceptance.drift(self.config.idle_drift, before, prior, steps)
        if not self.drafting:
            self.fleet.fade()

    def _best(self, step: PlannedRows, prices: StepPrices, depth: int) -> LookaheadDecision:
        accepted, trials = self.estimate[:, step.rows]
        values = self.fleet.corrected(survival(accepted, trials, depth).T)
        owed_s = prices.ingest_s * self.fleet.caught_up  # usual catch-up time per step
        if prices.ingest_s > 0 and np.maximum.reduce(step.draft_kv_lag) >= OWED_TOKENS:
            # A row's catch-up time is spread over its remaining steps, of two tokens each. Rows
            # whose first two drafts save less time than that do not draft.
            lag, remaining = step.draft_kv_lag, np.maximum(step.remaining_tokens, 1)
            debt_s = np.where(lag >= OWED_TOKENS, lag * (2 * prices.ingest_s / remaining), 0.0)
            pays = np.add.reduce(values[:2]) * (prices.step_s[0] / step.num_rows) > debt_s
            values = np.where(pays, values, 0.0)
            owed_s = max(owed_s, float(np.add.reduce(debt_s * pays)))
        step_s, answered = prices.step_s.copy(), self.fleet.answered
        step_s[1:] += owed_s
        if answered < 1:  # prices count drafts that come, decisions count planned drafts
            drafts = np.arange(len(step_s))
            step_s, values = np.interp(answered * drafts, drafts, step_s), answered * values
        return decide(values, step.max_drafts, StepPrices(step_s, prices.pass_s), self.decision)

    def _plan_experiment(self, step: PlannedRows, prices: StepPrices) -> None:
        """Begin an experiment if one is due, or else set the step of the next decision."""
        rows, plain_s = step.num_rows, float(prices.step_s[0])
        loss, share = self._gain / (1 + self._gain), _EXPERIMENTS
        if not self.drafting:
            ingest_s = prices.ingest_s * float(np.minimum.reduce(step.draft_kv_lag))
            loss = float(prices.step_s[1]) + prices.pass_s + ingest_s / LEAST_STEPS
            loss = loss / plain_s - 1
            loss -= self.prior[0] / self.prior[1] / rows
            share = _IDLE_EXPERIMENTS
        loss = max(loss, _LEAST_LOSS)
        length = int(max(MOST_STEPS * _LEAST_LOSS / loss, LEAST_STEPS))
        wait = int(length * loss / share)
        if self.drafting and not self.costs.is_measured(rows):  # the expected loss is a guess
            wait = min(wait, 2 * DECISION_STEPS)
        # After a switch, decisions follow soon, then ever later; otherwise their pace is fixed.
        since, due = self._steps - self._experiment.stop, self._experiment.stop + wait
        pace = max(since, SOON_STEPS) if len(self._experiment) == 0 else IDLE_STEPS
        if self._steps >= due:
            self._experiment = range(self._steps, self._steps + length)
            self._decide_at = self._experiment.stop
        elif not self.drafting:
            self._decide_at = min(self._steps + min(max(pace, DECISION_STEPS), IDLE_STEPS), due)
        elif self.costs.is_measured(rows + self.decision.total_drafts, drafts=True):
            self._decide_at = self._steps + min(pace, DECISION_STEPS)

    def _single_draft(self, step: PlannedRows) -> np.ndarray:
        """Return k = 1 for the row with the least catch-up, and 0 for others, int32 [rows]."""
        row = int(np.argmin(np.where(step.max_drafts > 0, step.draft_kv_lag, np.inf)))
        num_drafts = np.zeros(step.num_rows, dtype=np.int32)
        num_drafts[row] = min(step.budget_tokens, step.max_drafts[row], 1)
        return num_drafts
