"""The `goodput` policy: k of each row is what commits the most tokens a second at this load.

Beliefs (acceptance.py) and prices (cost_model.py) make a decision (draft_allocation.py), which then
stands for some steps: that many more the longer nothing changes. Steps in between cost a look at an
array, and nothing at all while nobody drafts. Some steps are experiments, so that what is not done
keeps its price: without drafts while there are some, with a draft of one row, which speaks for all,
while there are none. They come a few in a row, since the first finds caches and branches as the
other way left them, and wait until what they lose is a small share of what was served since.
Prices are learnt from steps between decisions: one that decides takes longer by that.

No clock, no randomness: inputs are the calls.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import structs

from cbatch.core.speculation import acceptance, draft_allocation
from cbatch.core.speculation.acceptance import DepthCorrection, FleetPrior, Tally
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.cost_model import OWED_TOKENS, OnlineCostModel, StepPrices
from cbatch.core.speculation.draft_allocation import LookaheadDecision
from cbatch.core.speculation.policy import (
    DraftedStep,
    LearningPolicy,
    PlannedRows,
    PolicyLimits,
    Shadow,
    StepBudget,
)
from cbatch.core.speculation.stats import Outlook

# For how many steps a decision stands: at first, and at most, while rows draft and while none does.
LEAST_STEPS, MOST_STEPS, MOST_IDLE_STEPS = 4, 16, 256
# Between probes; and of an experiment without drafts at most. Behind drafts a step finds the caches
# full of them, and takes a quarter longer than one of many without. So the smaller the gain the
# longer an experiment is, and its second half is looked at.
LEAST_IDLE_STEPS = 64
_DECISION_S = 3e-4  # what one takes, and half of that what is learnt of a step
_EXPERIMENTS = 0.01  # of time that they may cost, and decisions; half while nobody drafts
_SETTLED = 2  # steps behind a decision, by when its traces in the caches are gone


class GoodputPolicy(LearningPolicy):
    priced = True

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        max_slots, self.config, self.max_depth = limits.max_slots, config, config.k
        self.costs = OnlineCostModel(limits.profile, max_tokens=limits.max_tokens)
        self.fleet = FleetPrior(config)
        self.prior = self.fleet.sums()
        self.estimate = np.zeros((2, max_slots))
        self.estimate[:] = np.array(self.prior)[:, None]
        self.drafting = True
        self.num_switches = 0
        self._depths = DepthCorrection(config, max_slots)
        self._answered = acceptance.DOUBT, acceptance.DOUBT  # drafts that came, asked for; decayed
        self._caught_up = 0  # tokens since beliefs were last brought up
        self._caught_up_a_step = 0.0  # on average, while drafting
        self._tally = Tally(max_slots)
        self._num_drafts = np.zeros(max_slots, dtype=np.int32)
        self._first_drafts = 0  # of whoever comes
        self._decision: LookaheadDecision | None = None
        self._steps = 0  # calls of `choose`
        self._decided_at = 0  # the last one that made a decision
        self._learnt_at = 0  # the one that last brought beliefs up
        self._least_steps = LEAST_STEPS  # more, where steps are short
        self._worth_steps = 0  # of which a decision is as large a share as experiments may be
        self._plain_s = 0.0  # a step without drafts, at the latest probe
        self._probe_s = self._spent_s = 0.0  # what one takes, as measured; what this one took
        self._gain = 0.0  # of drafting, on average
        self._until = self._interval = 0  # the step of the next decision; how far that was ahead
        self._newcomers = self._judged_rows = 0
        self._prompt_at = -LEAST_STEPS  # the last step with tokens of a prompt
        self._cold_share = 0.0  # of the steps that were looked at: with one, or right behind
        self._tried_at = 0  # the step of the last experiment
        self._probe_at = 0  # the one that may be the next, while nobody drafts
        self._probe_until = 0  # the step behind the latest
        self._good_news = False  # since then, while nobody drafts
        self._plain_until = 0  # the step that drafts again
        self._watched = range(0)  # steps that are looked at, besides every so many

    # ---- slots --------------------------------------------------------------------------------

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        """Until the next decision it drafts as far as others did of whom as much is believed."""
        if self.drafting or self._first_drafts or carried is not None:
            self._newcomers += 1
        self._num_drafts[slot] = self._first_drafts
        super().enter(slot, carried)

    def leave(self, slot: int) -> tuple[float, float] | None:
        gained, trials = self._tally.take_slot(slot)
        if trials:
            found = acceptance.decayed(self.config.decay, self.estimate[:, slot], trials, gained)
            self.estimate[:, slot] = found
            self._tell_fleet(gained, trials)
        return super().leave(slot)

    # ---- steps --------------------------------------------------------------------------------

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        self._steps += 1
        if self._steps < self._plain_until:
            return None
        if self._steps >= self._until or self._disturbed(step.num_rows):
            return self._decide(step)
        if not self.drafting:
            return self._probe(step) if self._steps >= self._probe_at else None
        num_drafts: np.ndarray = np.minimum(self._num_drafts[step.rows], step.caps)
        return num_drafts

    def observe(self, step: DraftedStep) -> None:
        if step.shadow is not None:
            self._observe_shadow(step.shadow)
        drafted, accepted = step.num_drafted, step.num_accepted
        if step.total_planned:
            kept = math.exp(-step.total_planned / acceptance.LATEST_TRIALS)
            came, asked = self._answered
            self._answered = kept * came + step.total_drafted, kept * asked + step.total_planned
        if step.total_drafted:
            self._tally.add(step.rows, drafted, accepted, step.evidence)
            self._caught_up += max(step.total_caught_up - len(drafted), 0)  # one each is usual
            if not self.drafting:
                self._observe_probe(step)
        if step.has_chunks:
            self._prompt_at = self._steps
        stood = self._steps - self._decided_at
        if not self._is_looked_at(stood):
            return
        if step.total_drafted and self.drafting and not self._steps % LEAST_STEPS:
            self._depths.observe(step.rows, drafted, accepted)
        sample = step.sample()
        if not stood and self.costs.is_measured(sample.work.target_tokens):
            sample = structs.replace(sample, target_s=0.0)  # the decision is in it
        # Steps right behind a prompt, with caches full of it, count only where there are hardly
        # others, or none yet, and those with tokens of one, which cost otherwise, only if both.
        is_cold = self._steps - self._prompt_at <= LEAST_STEPS
        self._cold_share += (is_cold - self._cold_share) / MOST_STEPS
        known, usual = self.costs.is_known, not is_cold or self._cold_share > 0.5
        if (usual and not known) if step.has_chunks else (usual or not known):
            self.costs.observe(sample)

    @property
    def outlook(self) -> Outlook:  # type: ignore[override]
        calibration, found = self._depths.calibration, self._decision
        if found is None or not self.drafting:
            return Outlook(self.drafting, None, None, None, calibration)
        return Outlook(True, found.threshold, found.tokens_per_s, found.gain, calibration)

    # ---- inside -------------------------------------------------------------------------------

    def _disturbed(self, num_rows: int) -> bool:
        """Since the last decision: many requests are new, or there are more or fewer."""
        if not self._newcomers and num_rows == self._judged_rows:
            return False
        is_paid = self._steps - self._decided_at >= self._worth_steps // 2
        many_new = is_paid and 4 * self._newcomers >= num_rows
        return many_new or abs(num_rows - self._judged_rows) > max(self._judged_rows // 4, 1)

    def _learn(self) -> None:
        """Bring beliefs up: rows without drafts come closer to the prior."""
        steps, self._learnt_at = self._steps - self._learnt_at, self._steps
        prior, (gained, trials) = np.array(self.prior), self._tally.take()
        found = acceptance.drift(self.config.idle_drift, self.estimate, prior, steps)
        told = acceptance.decayed(self.config.decay, self.estimate, trials, gained)
        self.estimate = np.where(trials > 0, told, found)
        alike = 1 if self.drafting else self._judged_rows  # a probe is of one, and for all
        self._tell_fleet(*(alike * float(np.add.reduce(sums)) for sums in (gained, trials)))
        if self.drafting and steps:
            share = 1 - math.exp(-steps / acceptance.LATEST_TRIALS)
            self._caught_up_a_step += share * (self._caught_up / steps - self._caught_up_a_step)
        self._caught_up = 0

    def _observe_shadow(self, shadow: Shadow) -> None:
        slots, trials, hits = shadow
        before, decay = self.estimate[:, slots], self.config.decay
        self.estimate[:, slots] = acceptance.decayed(decay, before, trials, hits)
        gained, tried = float(np.add.reduce(hits)), float(np.add.reduce(trials))
        self._act_soon(gained, tried)
        self._tell_fleet(gained, tried)

    def _observe_probe(self, step: DraftedStep) -> None:
        sample = step.sample()
        self._spent_s += sample.draft_s + sample.target_s - self._plain_s
        if self._steps == self._probe_until - 1:
            self._probe_s += (self._spent_s - self._probe_s) / 2
        self._act_soon(float(np.add.reduce(step.num_accepted)), step.total_drafted)

    def _act_soon(self, gained: float, tried: float) -> None:
        """If that is news, twice as good as believed: a decision, and if nobody drafts then,
        another probe."""
        if gained * self.prior[1] > 2 * tried * self.prior[0]:
            self._until = min(self._until, self._steps + LEAST_STEPS)
            self._good_news = True

    def _tell_fleet(self, gained: float, trials: float) -> None:
        memory = acceptance.FLEET_TRIALS if self.drafting else acceptance.LATEST_TRIALS
        self.fleet.observe(gained, trials, memory)
        self.prior = self.fleet.sums()

    def _decide(self, step: PlannedRows) -> np.ndarray | None:
        self._decided_at = self._steps
        self._learn()
        if not self.drafting:
            self._depths.fade()
        disturbed, all_new = self._disturbed(step.num_rows), self._newcomers >= step.num_rows
        self._newcomers, self._judged_rows = 0, step.num_rows
        deepest = int(np.maximum.reduce(step.caps, initial=0))
        most = min(step.budget_tokens, deepest * step.num_rows)
        if most <= 0:
            self._until = self._steps + LEAST_STEPS
            return None
        if not self.costs.is_known:  # neither for drafts nor against them
            self._watch(0)
            self._until = self._steps + 1
            return None
        room = step.room()
        # What prompts take comes with requests, not with steps: it is no part of either price.
        prices = self.costs.prices(step.num_rows, room.context_tokens, most)
        self._worth_steps = int(_DECISION_S / (_EXPERIMENTS * float(prices.step_s[0])))
        self._least_steps = min(max(self._worth_steps, LEAST_STEPS), MOST_STEPS)
        found, kept_up = self._best(step, room, prices, deepest)
        self._let_stand(found, disturbed)
        self._first_drafts = self._drafts_of_a_newcomer(found, kept_up)
        if not self.drafting:
            soon = self._steps + 1
            self._probe_at = soon if self._good_news else max(self._probe_at, soon)
            return None
        self._num_drafts[step.rows] = found.num_drafts
        self._gain += (found.gain - self._gain) / LEAST_STEPS
        close = self.config.switch_gain / self._gain
        length = int(min(max(LEAST_IDLE_STEPS * close, LEAST_STEPS), LEAST_IDLE_STEPS))
        wait = max(length * self._gain / _EXPERIMENTS, MOST_STEPS)
        if not (all_new or self.costs.is_measured(step.num_rows)):  # that gain is a guess
            wait = min(wait, LEAST_IDLE_STEPS) if self._cold_share > 0.5 else MOST_STEPS
        if self._steps - self._tried_at < wait:
            return found.num_drafts
        self._tried_at = self._steps
        self._plain_until = self._until = self._steps + length
        return None

    def _drafts_of_a_newcomer(self, found: LookaheadDecision, prices: StepPrices) -> int:
        """While nobody drafts: 0 if it would not pay either if one row, or all, were new."""
        accepted, trials = np.array(self.prior)[:, None]
        survival = acceptance.survival(accepted, trials, self.max_depth)
        chances = self._share_answered * survival[0]
        if not self.drafting:
            rows = len(found.num_drafts)
            gains = (draft_allocation.gain_of_alike(chances, n, rows, prices) for n in (1, rows))
            return self.max_depth if max(gains) > self.config.switch_gain else 0
        deepest = int(np.maximum.reduce(found.num_drafts))
        return int(np.count_nonzero(chances[:deepest] >= found.threshold))

    def _best(
        self, step: PlannedRows, room: StepBudget, prices: StepPrices, depth: int
    ) -> tuple[LookaheadDecision, StepPrices]:
        """And prices with what drafting takes besides: decisions, and catching up."""
        accepted, trials = self.estimate[:, step.rows]
        expected = acceptance.survival(accepted, trials, depth).T
        values = self._depths.corrected(step.rows, expected)
        catching_up_s = prices.ingest_s * self._caught_up_a_step  # others will come that are owed
        if prices.ingest_s > 0 and np.maximum.reduce(step.lag) >= OWED_TOKENS:
            values, debts_s = self._without_late_rows(step.lag, room, values, prices)
            catching_up_s = max(catching_up_s, debts_s)
        step_s = prices.step_s.copy()
        step_s[1:] += _DECISION_S / MOST_STEPS + catching_up_s
        kept_up = StepPrices(step_s, prices.pass_s)
        shadow_prices = None if self._decision is None else self._decision.shadow_prices
        if (share := self._share_answered) < 1:  # prices are by drafts that are asked for, then
            drafts = np.arange(len(step_s))
            kept_up = StepPrices(np.interp(share * drafts, drafts, step_s), prices.pass_s)
            values = share * values
        return draft_allocation.decide(values, step.caps, kept_up, shadow_prices), kept_up

    @property
    def _share_answered(self) -> float:
        """Of the drafts that are asked for, those that the drafter has."""
        return min(self._answered[0] / self._answered[1], 1.0)

    def _without_late_rows(
        self, lag: np.ndarray, room: StepBudget, values: np.ndarray, prices: StepPrices
    ) -> tuple[np.ndarray, float]:
        """The drafter catches up with a row before it drafts: what that takes is spread over the
        steps that the request has left, two tokens each. Rows whose drafts, as deep as the last
        ones, are not worth it have none; the others' debts are on every step with drafts."""
        left = lag + 1 if room.left_tokens is None else np.maximum(room.left_tokens, 1)
        debt_s = np.where(lag >= OWED_TOKENS, lag * (2 * prices.ingest_s / left), 0.0)
        depth = 1 if self._decision is None else 1 + int(self._decision.num_drafts.max())
        worth_s = np.add.reduce(values[:depth], axis=0) * (prices.step_s[0] / len(lag))
        pays = worth_s > debt_s
        return np.where(pays, values, 0.0), float(np.add.reduce(debt_s * pays))

    def _is_looked_at(self, stood: int) -> bool:
        """Whether this step, so many behind the last decision, teaches prices."""
        if self._steps < self._plain_until:
            return 2 * self._steps >= self._plain_until + self._tried_at
        if self._steps in self._watched:
            return True
        # Whenever it was decided: newcomers call for that, whose prompts make steps long.
        seldom = max(self._least_steps // 2, LEAST_STEPS) if self.drafting else MOST_STEPS
        return not self._steps % seldom and stood >= _SETTLED

    def _watch(self, later: int, steps: int = 1) -> None:
        """So many steps are looked at, from one that is so much later than this."""
        self._watched = range(self._steps + later, self._steps + later + steps)

    def _let_stand(self, found: LookaheadDecision, disturbed: bool) -> None:
        """Whether it is carried out, and how long it stands: twice as long as the last one, if it
        is much the same and of much the same requests."""
        was, before = self.drafting, self._decision
        self.drafting = found.gain > (0.0 if was else self.config.switch_gain)
        total = int(np.add.reduce(found.num_drafts))
        total_before = int(np.add.reduce(before.num_drafts)) if before else 0
        other = was != self.drafting or not 3 * total_before <= 4 * total <= 5 * total_before
        longest = MOST_STEPS if self.drafting else MOST_IDLE_STEPS
        again = self._least_steps if disturbed or other else min(2 * self._interval, longest)
        guessed = not self.costs.is_measured(len(found.num_drafts) + total)
        if self.drafting and guessed and (disturbed or other):  # whatever it costs, once
            later = _SETTLED if self._least_steps > LEAST_STEPS else 0  # if they are short
            again = 1 + later
            self._watch(later)
        self._decision, self._interval, self._until = found, again, self._steps + again
        if was != self.drafting or (disturbed and was):
            self._watch(0, 2)  # drafters catch up
        if was != self.drafting:
            self._gain = found.gain
            self.num_switches += 1
            self._tried_at, self._good_news = self._steps, False

    def _probe(self, step: PlannedRows) -> np.ndarray | None:
        """A draft of the row that the drafter is least behind, if it is due, and in the steps
        behind it: only the last of them takes as long as drafting does for good."""
        row = int(np.argmin(np.where(step.caps > 0, step.lag, np.inf)))
        if step.budget_tokens < 1 or step.caps[row] < 1:
            self._probe_at = self._steps + MOST_STEPS
            return None
        if self._steps >= self._probe_until and not self._begins_probe(step, row):
            return None
        num_drafts = np.zeros(step.num_rows, dtype=np.int32)
        num_drafts[row] = 1
        return num_drafts

    def _begins_probe(self, step: PlannedRows, row: int) -> bool:
        """Whether one is due."""
        prices = self.costs.prices(step.num_rows, step.room().context_tokens, 1)
        self._plain_s = float(prices.step_s[0])
        draft_s = prices.pass_s + float(prices.step_s[1]) - self._plain_s
        cost_s = prices.ingest_s * float(step.lag[row]) + LEAST_STEPS * draft_s
        cost_s = max(cost_s, self._probe_s)
        wait = max(int(2 * cost_s / (_EXPERIMENTS * self._plain_s)), LEAST_IDLE_STEPS)
        if self._steps - self._tried_at < wait and not self._good_news:
            self._probe_at = self._tried_at + wait
            return False
        self._tried_at, self._good_news, self._spent_s = self._steps, False, 0.0
        self._probe_until = self._steps + LEAST_STEPS
        self._watch(LEAST_STEPS - 1)
        return True
