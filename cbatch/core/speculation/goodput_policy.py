"""The `goodput` policy as the scheduler holds it: estimator, price list and gate in one place.

The parts are pure (acceptance.py, draft_allocation.py) or keep little (gate.py, cached_decision.py,
cost_model.py); this joins them and holds what passes from one step to the next. No clock, no
randomness: its inputs are the calls.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.speculation import acceptance, draft_allocation
from cbatch.core.speculation.acceptance import FleetPrior
from cbatch.core.speculation.cached_decision import CachedDecision
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.cost_model import OnlineCostModel
from cbatch.core.speculation.depth_correction import DepthOdds
from cbatch.core.speculation.feedback import AcceptanceFeedback, Rows
from cbatch.core.speculation.gate import (
    FIRST_ROW_PROBE_STEPS,
    MOST_ROW_PROBE_STEPS,
    Due,
    SpeculationGate,
    rows_to_probe,
)
from cbatch.core.speculation.policy import (
    DraftedStep,
    LearningPolicy,
    PlannedRows,
    PolicyLimits,
    Shadow,
    StepBudget,
)
from cbatch.core.speculation.stats import Outlook

_PROBE_DRAFTS = 4
_FLEET_TRIALS = 160.0  # memory of the prior: some ten requests
_PROBE_TRIALS = 16.0  # the same while probes are all there is to learn from
_FOLD_STEPS = 32  # between two reports of running rows to the fleet
_COST_STEPS = 16  # while off, one step in so many corrects the price list
_ROW_PROBE_SHARE = 0.01  # of the rows of a step
_NEWS = 0.1  # a rise of estimated acceptance that is worth a decision
# Whose drafter is behind by fewer tokens than this owes nothing; the price of catching up is spread
# over the steps that it is expected to serve: so many tokens, or what the request has left.
_OWED_TOKENS = 8
_HORIZON_TOKENS = 64
_TOKENS_A_STEP = 2.0
_ROW_PROBE_LAG_TOKENS = 64  # rows further behind are probed at the longest interval only
# While on, now and then a step drafts nothing, so that the price of that is known: soon when there
# are clearly more or fewer rows than the last time, then ever later, the later the more is gained.
_FIRST_PLAIN_STEPS, _PLAIN_STEPS, _PLAIN_STEPS_BELOW_GAIN, _SMALL_GAIN = 12, 256, 48, 0.3


def _catch_up_cost_s(lag: np.ndarray, room: StepBudget, ingest_s: float) -> np.ndarray | None:
    """What catching up costs each row a step, float64 [rows], once it is spread; None: nothing."""
    if ingest_s <= 0 or np.maximum.reduce(lag) < _OWED_TOKENS:
        return None
    left = _HORIZON_TOKENS if room.left_tokens is None else room.left_tokens
    steps = np.minimum(np.maximum(left, 1), _HORIZON_TOKENS) / _TOKENS_A_STEP
    catch_up_cost_s: np.ndarray = np.where(lag >= _OWED_TOKENS, lag * (ingest_s / steps), 0.0)
    return catch_up_cost_s


class GoodputPolicy(LearningPolicy):
    """Acceptance by row, prices by step, and a gate that spares both while drafts do not pay."""

    priced = True

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.config, max_slots = config, limits.max_slots
        self.max_depth = config.k
        self.costs = OnlineCostModel(limits.profile, max_tokens=limits.max_tokens)
        self.gate = SpeculationGate(switch_gain=config.switch_gain)
        self.fleet = FleetPrior.of(config)
        self.prior = self.fleet.sums()  # N and D of a request without history
        self.statistics = np.zeros((acceptance.NUM_STATISTICS, max_slots), dtype=np.float64)
        self.estimate = self.statistics[: acceptance.DROP]  # N and D, a view
        self.estimate[:] = np.array(self.prior)[:, None]
        self._depths = DepthOdds(config.k)
        self._feedback = AcceptanceFeedback(max_slots)
        self._shadow_prices: draft_allocation.ShadowPrices | None = None
        self._cached_decision = CachedDecision(max_slots)
        self._folded_steps = 0
        self._gain, self._threshold = 0.0, np.inf  # of the last decision; the latter is its lambda
        self._tokens_per_s: float | None = None  # the same
        self._plain_s = np.inf  # of a step like that without drafts
        self._risen = np.zeros(max_slots)  # by how much shadow evidence raised an estimate since
        self._steps = 0
        self._drafting_steps = 0  # since a step without drafts
        self._plain_rows = 0  # of that step
        self._plain_steps = 0  # in a row
        self._plain_gap = _FIRST_PLAIN_STEPS  # steps until the next one
        self._undrifted_steps = 0  # steps without drafts that the statistics have not felt yet

    # ---- slots --------------------------------------------------------------------------------

    def enter(self, slot: int, carried: tuple[float, float] | None) -> None:
        self.gate.newcomers += 1
        self.statistics[:, slot] = 0.0
        self._risen[slot] = 0.0
        super().enter(slot, carried)
        known = (
            self.survival(np.array([slot]), self.config.k) if self._cached_decision.drafts else None
        )
        self._cached_decision.enter(slot, known)

    def leave(self, slot: int) -> tuple[float, float] | None:
        gained, tried = self._feedback.drop(slot)
        self.statistics[acceptance.FRESH_ACCEPTED, slot] += gained
        self.statistics[acceptance.FRESH_TRIALS, slot] += tried
        if self.statistics.item(acceptance.FRESH_TRIALS, slot):
            self._fold(np.array([slot]), _FLEET_TRIALS)
        return super().leave(slot)

    # ---- steps --------------------------------------------------------------------------------

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        due = self.gate.due(step.num_rows, self._cached_decision.pace)
        if due is Due.NOTHING:
            return None
        rows, caps, budget_tokens = step.rows, step.caps, step.budget_tokens
        if due is Due.PROBE:
            return self._probe(caps, step.lag, budget_tokens)
        if self._wants_plain_step(step.num_rows):
            return None
        cached = self._cached_decision.get(rows, caps, budget_tokens) if self.gate.on else None
        if cached is not None:
            return cached if self._cached_decision.drafts else None
        num_drafts = self._decide(step)
        self._cached_decision.set(rows, num_drafts, budget_tokens, self._threshold, self._plain_s)
        return None if num_drafts is None else self._with_row_probes(step, num_drafts)

    def observe(self, step: DraftedStep) -> None:
        self._observe_drafts(step)
        if step.shadow is not None:
            self._observe_shadow(step.shadow)

    def _observe_drafts(self, step: DraftedStep) -> None:
        drafted = step.total_drafted > 0
        if self._nothing_to_learn(len(step.num_drafted), drafted):
            return
        rows, num_drafted, num_accepted = step.rows, step.num_drafted, step.num_accepted
        if not drafted or self._steps % self._cached_decision.steps == 0:
            self.costs.observe(step.sample())
            if not drafted:
                return
            self._depths.observe(self.estimate[:, rows], num_drafted, num_accepted)
        if not self.gate.on:
            self._observe_probe(rows, num_drafted, num_accepted, step.evidence)
            return
        gained = num_accepted if step.evidence is None else step.evidence
        self._feedback.add(rows, num_accepted, num_accepted < num_drafted, gained)
        if self._feedback.steps >= self._cached_decision.steps:
            self._folded_steps += self._feedback.steps
            self._update()
            if self._folded_steps >= _FOLD_STEPS:
                self._folded_steps = 0
                self._fold(rows, _FLEET_TRIALS)

    def _nothing_to_learn(self, num_rows: int, drafted: bool) -> bool:
        """Counts a step that has committed; whether there is nothing to learn from it."""
        self._steps += 1
        if drafted:
            self._drafting_steps += 1
            return False
        self._plain_steps = 1 if self._drafting_steps else self._plain_steps + 1
        self._drafting_steps, self._plain_rows = 0, num_rows
        self._undrifted_steps += 1
        if not self.gate.on:
            return self._steps % (_COST_STEPS * self._cached_decision.pace) != 0
        return self._plain_steps > 1 and self._steps % self._cached_decision.steps != 0

    def _observe_shadow(self, shadow: Shadow) -> None:
        """While off, rows that turn out better count as newcomers: they may draft well, too."""
        slots, trials, hits = shadow
        self._update()
        self._drift()
        before = self.estimate[:, slots]
        after = acceptance.decayed(self.config, before, trials, hits)
        self.estimate[:, slots] = after
        self.statistics[acceptance.FRESH_ACCEPTED, slots] += hits
        self.statistics[acceptance.FRESH_TRIALS, slots] += trials
        self._risen[slots] += after[0] / after[1] - before[0] / before[1]
        better = slots[self._risen[slots] > _NEWS]
        self._risen[better] = 0.0
        self.gate.newcomers += len(better)

    def survival(self, rows: Rows, depth: int) -> np.ndarray:
        """What is believed of the next drafts of these slots, float64 [rows, depth]."""
        accepted, trials = self.estimate[:, rows]
        return acceptance.survival(accepted, trials, depth, self._depths.odds)

    @property
    def outlook(self) -> Outlook:  # type: ignore[override]
        drafts = self.gate.on and self._tokens_per_s is not None
        return Outlook(
            drafting=self.gate.on,
            price=self._threshold if drafts else None,
            tokens_per_s=self._tokens_per_s if drafts else None,
            gain=self._gain if drafts else None,
            calibration=self._depths.calibration,
        )

    # ---- inside -------------------------------------------------------------------------------

    def _wants_plain_step(self, num_rows: int) -> bool:
        if not self.gate.on or self._drafting_steps < _FIRST_PLAIN_STEPS:
            return False
        if not 2 * self._plain_rows <= 3 * num_rows <= 5 * self._plain_rows:
            self._plain_gap = _FIRST_PLAIN_STEPS
        most = _PLAIN_STEPS_BELOW_GAIN if self._gain < _SMALL_GAIN else _PLAIN_STEPS
        if self._drafting_steps < min(self._plain_gap, most):
            return False
        self._plain_gap = min(self._plain_gap, most) + _FIRST_PLAIN_STEPS
        return True

    def _decide(self, step: PlannedRows) -> np.ndarray | None:
        self._update()
        self._drift()
        self._risen[:] = 0.0
        rows, caps, room = step.rows, step.caps, step.room()
        depth = int(np.maximum.reduce(caps, initial=0))
        most = min(step.budget_tokens, depth * len(caps))
        if most <= 0:
            self.gate.judge(0.0, len(caps))
            return None
        prices = self.costs.prices(len(caps), room.base_tokens, room.context_tokens, most)
        # Optimism: a price that is too high would never be corrected, one too low soon is.
        prices = prices.cheaper(self.costs.optimism(len(caps)))
        self._plain_s = float(prices.step_s[0])
        survival = self.survival(rows, depth)
        catch_up_cost_s = _catch_up_cost_s(step.lag, room, prices.ingest_s)
        decision = draft_allocation.decide(
            survival, caps, prices, self._shadow_prices, room.blocks, catch_up_cost_s
        )
        self._shadow_prices, self._gain = decision.shadow_prices, decision.gain
        self._threshold, self._tokens_per_s = decision.threshold, decision.tokens_per_s
        was_on = self.gate.on
        carried_out = self.gate.judge(decision.gain, len(caps))
        if was_on and not self.gate.on:
            self._fold(rows, _FLEET_TRIALS)
        return decision.num_drafts if carried_out else None

    def _with_row_probes(self, step: PlannedRows, num_drafts: np.ndarray) -> np.ndarray:
        """The decision, with one draft for a few rows that have had none for long."""
        rows, caps, lag = step.rows, step.caps, step.lag
        idle = self.statistics[acceptance.IDLE_STEPS, rows]
        idle = np.where(num_drafts > 0, 0.0, idle + self._cached_decision.steps)
        self.statistics[acceptance.IDLE_STEPS, rows] = idle
        if np.maximum.reduce(idle) >= 1:
            left = max(step.budget_tokens - int(np.add.reduce(num_drafts)), 0)
            most_probes = min(left, 1 + int(_ROW_PROBE_SHARE * len(caps)))
            due = rows_to_probe(
                idle, self._cached_decision.steps, self._steps % len(caps), most_probes
            )
            due = due[(lag[due] <= _ROW_PROBE_LAG_TOKENS) | (idle[due] >= MOST_ROW_PROBE_STEPS)]
            if len(due):
                num_drafts = num_drafts.copy()
                num_drafts[due] = np.minimum(caps[due], 1)
        return num_drafts

    def _probe(self, caps: np.ndarray, lag: np.ndarray, budget_tokens: int) -> np.ndarray | None:
        """A few drafts for the row whose drafter is least behind."""
        can = (caps > 0).nonzero()[0]
        if not len(can):
            return None
        row = can[lag[can].argmin()]
        num_drafts = np.zeros(len(caps), dtype=np.int32)
        num_drafts[row] = min(int(caps[row]), _PROBE_DRAFTS, max(budget_tokens, 0))
        return num_drafts

    def _update(self) -> None:
        """Tell the estimator of what was tallied."""
        if not self._feedback.steps:
            return
        self._drift()
        slots, (accepted, rejected, gained), steps = self._feedback.take()
        self.statistics[:, slots] = acceptance.update(
            self.config, self.statistics[:, slots], accepted, rejected, gained, self.prior, steps
        )
        # A probe that found something asks for the next one at once.
        soon = np.where(accepted > 0, FIRST_ROW_PROBE_STEPS - self._cached_decision.steps, np.inf)
        idle = self.statistics[acceptance.IDLE_STEPS, slots]
        self.statistics[acceptance.IDLE_STEPS, slots] = np.minimum(idle, soon)

    def _observe_probe(
        self,
        rows: Rows,
        num_drafted: np.ndarray,
        num_accepted: np.ndarray,
        evidence: np.ndarray | None,
    ) -> None:
        """While off, a probe speaks for the fleet; the others go on as they were."""
        self._update()
        self._undrifted_steps += 1
        probed = (num_drafted > 0).nonzero()[0]
        slots = np.arange(self.statistics.shape[1])[rows][probed]
        self.statistics[:, slots] = acceptance.observe(
            self.config,
            self.statistics[:, slots],
            num_drafted[probed],
            num_accepted[probed],
            self.prior,
            None if evidence is None else evidence[probed],
        )
        before = self.fleet.means / self.fleet.weight
        self._fold(slots, _PROBE_TRIALS)
        self.gate.observe(better=self.fleet.means / self.fleet.weight > before)

    def _drift(self) -> None:
        """Steps without drafts bring every slot closer to the prior; applied when it matters."""
        if self._undrifted_steps:
            self.estimate[:] = acceptance.drift(
                self.config, self.estimate, self.prior, self._undrifted_steps
            )
            self._undrifted_steps = 0

    def _fold(self, rows: Rows, memory_trials: float) -> None:
        """Give the fleet the evidence of these slots that it has not had."""
        fresh = slice(acceptance.FRESH_ACCEPTED, acceptance.FRESH_TRIALS + 1)
        accepted, trials = self.statistics[fresh, rows]
        self.fleet = self.fleet.fold(accepted, trials, memory_trials)
        self.prior = self.fleet.sums()
        self.statistics[fresh, rows] = 0.0
