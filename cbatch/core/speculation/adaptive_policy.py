"""The `adaptive` policy: it chooses each row's k to commit the most tokens per second at this load.

A decision (draft_allocation.py) uses estimates of acceptance (acceptance.py) and prices of steps
(step_costs.py). It is kept for some steps, or until a quarter of the batch has changed.

The policy is in one of two modes: rows draft, or no row drafts. Experiments keep the price of the
other mode up to date: steps without drafts while rows draft, or one draft per step while no row
drafts. Prices are learned from the second half of an experiment, because its first steps run with
the caches of the other mode. The cheaper its steps, the longer an experiment. The next experiment
waits until its expected loss is a small share of the time since the last experiment.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.step_costs import StepPrices
from cbatch.core.speculation import acceptance
from cbatch.core.speculation.acceptance import OverallAcceptance, Rows, survival
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.draft_allocation import LookaheadDecision, decide
from cbatch.core.speculation.policies import EstimatingPolicy
from cbatch.core.speculation.policy import (
    DraftedStep,
    PlannedRows,
    PolicyLimits,
    PolicyStats,
    SurvivalStats,
)

# Steps from one decision to the next: after a change of mode, while rows draft, while none does.
SOON_STEPS, DECISION_STEPS, IDLE_STEPS = 4, 16, 256
IDLE_PRICE_STEPS = 48  # from one step whose price is learned to the next, while no row drafts
# Steps of an experiment: the maximum if a step loses at most `_MIN_LOSS`.
MIN_EXPERIMENT_STEPS, MAX_EXPERIMENT_STEPS = 4, 64
# Steps whose states draft heads read before an experiment with drafts. With 4, fewer are accepted.
WARM_UP_STEPS = 8
MIN_LAG_TOKENS = 8  # catching up on fewer tokens costs a drafter almost nothing
_MIN_LOSS = 0.02  # smallest loss assumed for a step of an experiment, as a share of its time
_EXPERIMENT_SHARE = 0.005  # of time, that experiments may lose


class AdaptivePolicy(EstimatingPolicy):
    priced = True

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.costs = limits.costs
        self.all_rows = OverallAcceptance(config)
        super().__init__(config, limits)
        self.drafting = True
        self.decision = LookaheadDecision(np.zeros(0, np.int32))
        self._gain = 0.0  # of drafting, averaged over the decisions since the last switch
        self._num_drafts = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._newcomer_drafts = 0  # k of a row that enters, until the next decision
        self._steps = 0  # calls of `choose`
        self._decided_at = self._decide_at = 0  # steps of the last decision and of the next
        self._learns_from = 0  # step of the last decision that prompts did not cause
        self._newcomers = 0  # rows that entered since the last decision
        self._experiment = range(0)  # steps of the latest experiment
        self._states_from = 0  # step from which hidden states are kept if no row drafts
        self._had_prompts = False  # whether prompts waited at the last decision

    @property
    def prior(self) -> tuple[float, float]:
        return self.all_rows.prior

    def enter(self, slot: int, policy_state: tuple[float, float] | None) -> None:
        # While no row drafts, experiments find out whether rows without history should draft.
        self._newcomers += self.drafting or policy_state is not None
        self._num_drafts[slot] = self._newcomer_drafts
        super().enter(slot, policy_state)

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        self._steps += 1
        if self._steps not in self._experiment and (
            self._steps >= self._decide_at or self._has_changed(step)
        ):
            self._decide(step)
        self.keeps_states = self.drafting or self._steps >= self._states_from
        if self._steps in self._experiment:
            return None if self.drafting else self._single_draft(step)
        if not self.drafting or not self.decision.gain:
            return None
        num_drafts: np.ndarray = np.minimum(self._num_drafts[step.rows], step.max_drafts)
        return num_drafts

    def observe(self, step: DraftedStep) -> None:
        learns_prices = self._learns_prices()
        if step.total_planned:
            self._observe_drafts(step, learns_prices)
        if learns_prices and not step.has_chunks:  # others are observed in any case
            self.costs.observe(step.sample())

    def _observe_drafts(self, step: DraftedStep, learns_prices: bool) -> None:
        if learns_prices and self.drafting and step.total_drafted:
            accepted, trials = self.estimate[:, step.rows]
            chances = survival(accepted, trials, self.max_depth).T
            self.all_rows.observe_depths(chances, step.num_drafted, step.num_accepted)
        super().observe(step)
        caught_up = max(step.total_caught_up - len(step.num_drafted), 0)  # beyond one per row
        self.all_rows.observe_drafter(step.total_planned, step.total_drafted, caught_up)

    def learn(self, rows: Rows, trials: np.ndarray, accepted: np.ndarray) -> None:
        super().learn(rows, trials, accepted)
        memory = acceptance.OVERALL_TRIALS if self.drafting else acceptance.IDLE_TRIALS
        self.all_rows.observe(float(np.add.reduce(accepted)), float(np.add.reduce(trials)), memory)

    @property
    def stats(self) -> PolicyStats:  # type: ignore[override]
        decision, totals = self.decision, SurvivalStats(*self.all_rows.totals.tolist())
        if decision.tokens_per_s is None or not self.drafting:
            return PolicyStats(self.drafting, None, None, None, totals)
        return PolicyStats(True, decision.threshold, decision.tokens_per_s, decision.gain, totals)

    def _has_changed(self, step: PlannedRows) -> bool:
        """Return whether a quarter of the batch has entered or left since the last decision, or
        prompts have come or are computed."""
        previous, num_rows = len(self.decision.num_drafts), step.num_rows
        if self.drafting and (step.num_prompts > 0) != self._had_prompts:
            return True
        if abs(num_rows - previous) > max(previous // 4, 1):
            return True
        is_due = self._steps - self._decided_at >= SOON_STEPS
        return is_due and 4 * self._newcomers >= max(num_rows, 1)

    def _learns_prices(self) -> bool:
        """Return whether prices are learned from this step. The step of a decision and the steps
        right after it are left out, because they take longer."""
        if self._steps in self._experiment:
            return 2 * self._steps >= self._experiment.start + self._experiment.stop
        interval = SOON_STEPS if self.drafting else IDLE_PRICE_STEPS
        since = self._steps - self._learns_from
        return since % interval == SOON_STEPS - 1 or not self.costs.is_known

    def _decide(self, step: PlannedRows) -> None:
        self._drift()
        if self._steps >= self._decide_at or (step.num_prompts > 0) == self._had_prompts:
            self._learns_from = (
                self._steps
            )  # else none would be learned from, as prompts come often
        self._decided_at, self._newcomers = self._steps, 0
        self._had_prompts = step.num_prompts > 0
        self._decide_at = self._steps + SOON_STEPS
        depth = int(np.maximum.reduce(step.max_drafts, initial=0))
        max_total = min(step.budget_tokens, depth * step.num_rows)
        no_drafts = LookaheadDecision(np.zeros(step.num_rows, np.int32))
        if max_total <= 0 or not self.costs.is_known:
            self.decision = no_drafts
            self._num_drafts[step.rows] = 0
            return
        prices = self.costs.prices(step.num_rows, step.context_tokens, np.arange(max_total + 1))
        decision, was_drafting = self._best(step, prices, depth), self.drafting
        if self._had_prompts and decision.gain <= self.config.switch_gain:
            decision = no_drafts  # a small gain does not make up for longer gaps of other rows
        if not (was_drafting and self._had_prompts):  # else drafts only pause
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
        if not self.drafting or not self.decision.gain:
            self.all_rows.fade()

    def _best(self, step: PlannedRows, prices: StepPrices, depth: int) -> LookaheadDecision:
        accepted, trials = self.estimate[:, step.rows]
        values = self.all_rows.corrected(survival(accepted, trials, depth).T)
        catch_up_s = prices.ingest_s * self.all_rows.caught_up  # usual catch-up time per step
        if prices.ingest_s > 0 and np.maximum.reduce(step.draft_kv_lag) >= MIN_LAG_TOKENS:
            # A row's catch-up time is spread over its remaining steps, of two tokens each. A row
            # does not draft if its first two drafts save less time than the share of one step.
            lag, remaining = step.draft_kv_lag, np.maximum(step.remaining_tokens, 1)
            row_s = np.where(lag >= MIN_LAG_TOKENS, lag * (2 * prices.ingest_s / remaining), 0.0)
            num_waiting = step.num_rows + step.num_prompts
            pays = np.add.reduce(values[:2]) * (prices.step_s[0] / num_waiting) > row_s
            values = np.where(pays, values, 0.0)
            catch_up_s = max(catch_up_s, float(np.add.reduce(row_s * pays)))
        step_s, delivered = prices.step_s.copy(), self.all_rows.delivered_share
        step_s[1:] += catch_up_s
        if delivered < 1:  # prices are of delivered drafts, decisions of planned drafts
            drafts = np.arange(len(step_s))
            step_s, values = np.interp(delivered * drafts, drafts, step_s), delivered * values
        prices = StepPrices(step_s, prices.pass_s)
        return decide(values, step.max_drafts, prices, self.decision, num_waiting=step.num_prompts)

    def _plan_experiment(self, step: PlannedRows, prices: StepPrices) -> None:
        """Begin an experiment if one is due, or else set the step of the next decision."""
        rows, plain_s = step.num_rows, float(prices.step_s[0])
        loss = self._gain / (1 + self._gain)
        if not self.drafting:
            ingest_s = prices.ingest_s * float(np.minimum.reduce(step.draft_kv_lag))
            loss = float(prices.step_s[1]) + prices.pass_s + ingest_s / MIN_EXPERIMENT_STEPS
            loss = loss / plain_s - 1
            loss -= self.prior[0] / self.prior[1] / rows
        loss = max(loss, _MIN_LOSS)
        length = int(max(MAX_EXPERIMENT_STEPS * _MIN_LOSS / loss, MIN_EXPERIMENT_STEPS))
        wait = int(length * loss / _EXPERIMENT_SHARE)
        if self.drafting and not self.costs.is_measured(drafts=False):  # the loss is a guess
            wait = min(wait, 2 * DECISION_STEPS)
        # After a change of mode, the steps between decisions grow; after an experiment they do not.
        since, due = self._steps - self._experiment.stop, self._experiment.stop + wait
        self._states_from = due - WARM_UP_STEPS
        interval = max(since, SOON_STEPS) if len(self._experiment) == 0 else IDLE_STEPS
        if self._steps >= due:
            self._experiment = range(self._steps, self._steps + length)
            self._decide_at = self._experiment.stop
        elif not self.drafting:
            self._decide_at = min(self._steps + min(max(interval, DECISION_STEPS), IDLE_STEPS), due)
        elif self.costs.is_measured(drafts=True):
            self._decide_at = self._steps + min(interval, DECISION_STEPS)

    def _single_draft(self, step: PlannedRows) -> np.ndarray:
        """Return k = 1 for the row with the least catch-up, and 0 for others, int32 [rows]."""
        row = int(np.argmin(np.where(step.max_drafts > 0, step.draft_kv_lag, np.inf)))
        num_drafts = np.zeros(step.num_rows, dtype=np.int32)
        num_drafts[row] = min(step.budget_tokens, step.max_drafts[row], 1)
        return num_drafts
