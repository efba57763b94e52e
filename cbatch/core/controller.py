"""The `goodput` policy as the scheduler holds it: estimator, price list and regime in one place.

The parts are pure (estimator.py, goodput.py) or keep little (regime.py, cost.py); this joins them
and holds what passes from one step to the next. No clock, no randomness: its inputs are the calls.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from cbatch.core import estimator, goodput, lookahead
from cbatch.core.config import LookaheadConfig
from cbatch.core.cost import CostModel, CostProfile, StepLoad
from cbatch.core.depths import DepthOdds
from cbatch.core.estimator import FleetPrior
from cbatch.core.held import HeldDecision
from cbatch.core.outlook import Outlook
from cbatch.core.regime import FIRST_PROBE_STEPS, MOST_PROBE_STEPS, Due, Regime, probes
from cbatch.core.tally import Rows, Tally

_CANARY_DRAFTS = 4
_FLEET_TRIALS = 160.0  # memory of the prior: some ten requests
_CANARY_TRIALS = 16.0  # the same while canaries are all there is to learn from
_FOLD_STEPS = 32  # between two reports of running rows to the fleet
_COST_STEPS = 16  # while off, one step in so many corrects the price list
_PROBE_SHARE = 0.01  # of the rows of a step
_NEWS = 0.1  # a rise of estimated acceptance that is worth a decision
# Whose drafter is behind by fewer tokens than this owes nothing; the price of catching up is spread
# over the steps that it is expected to serve: so many tokens, or what the request has left.
_OWED_TOKENS = 8
_HORIZON_TOKENS = 64
_TOKENS_A_STEP = 2.0
_PROBE_LAG_TOKENS = 64  # rows further behind are probed at the longest interval only
# While on, now and then a step drafts nothing, so that the price of that is known: soon when there
# are clearly more or fewer rows than the last time, then ever later, the later the more is gained.
_FIRST_PLAIN_STEPS, _PLAIN_STEPS, _PLAIN_STEPS_BELOW_GAIN, _SMALL_GAIN = 12, 256, 48, 0.3


class Room(msgspec.Struct, frozen=True):
    """What a step has for drafts besides money."""

    base_tokens: int  # target tokens without drafts: one a decoding row, and prompt chunks
    context_tokens: int  # sum over the rows
    left_tokens: np.ndarray | None = None  # int32 [rows], of the request; None: many
    # Where the pool is short: positions that each row can draft within its blocks, int32 [rows],
    # and free positions in the pool.
    blocks: tuple[np.ndarray, int] | None = None


def _debts_s(lag: np.ndarray, room: Room, ingest_s: float) -> np.ndarray | None:
    """What catching up costs each row a step, float64 [rows], once it is spread; None: nothing."""
    if ingest_s <= 0 or np.maximum.reduce(lag) < _OWED_TOKENS:
        return None
    left = _HORIZON_TOKENS if room.left_tokens is None else room.left_tokens
    steps = np.minimum(np.maximum(left, 1), _HORIZON_TOKENS) / _TOKENS_A_STEP
    debts_s: np.ndarray = np.where(lag >= _OWED_TOKENS, lag * (ingest_s / steps), 0.0)
    return debts_s


class StepCost(msgspec.Struct, frozen=True):
    load: StepLoad
    draft_s: float
    target_s: float


class LookaheadController:
    """In every plan `due`, and `choose` unless nothing is; in every commit `rests`, and `learn` if
    it does not; `enter` and `leave` with slots."""

    def __init__(
        self,
        config: LookaheadConfig,
        *,
        max_slots: int,
        max_tokens: int,
        profile: CostProfile | None = None,
    ) -> None:
        """`max_tokens` is the most target tokens of a step."""
        self.config = config
        self.costs = CostModel(profile, max_tokens=max_tokens)
        self.regime = Regime(switch_gain=config.switch_gain)
        self.fleet = FleetPrior.of(config)
        self.prior = self.fleet.sums()  # N and D of a request without history
        self.statistics = np.zeros((estimator.NUM_STATISTICS, max_slots), dtype=np.float64)
        self.estimate = self.statistics[: estimator.DROP]  # N and D, a view
        self.estimate[:] = np.array(self.prior)[:, None]
        self._depths = DepthOdds(config.k)
        self._tally = Tally(max_slots)
        self._market: goodput.Market | None = None
        self._held = HeldDecision(max_slots)
        self._folded_steps = 0
        self._gain, self._threshold = 0.0, np.inf  # of the last decision
        self._tokens_per_s: float | None = None  # the same
        self._plain_s = np.inf  # of a step like that without drafts
        self._risen = np.zeros(max_slots)  # by how much shadows raised an estimate since
        self._steps = 0
        self._drafting_steps = 0  # since a step without drafts
        self._plain_rows = 0  # of that step
        self._plain_steps = 0  # in a row
        self._plain_gap = _FIRST_PLAIN_STEPS  # steps until the next one
        self._undrifted_steps = 0  # steps without drafts that the statistics have not felt yet

    # ---- slots --------------------------------------------------------------------------------

    def enter(self, slot: int, estimate: tuple[float, float] | None = None) -> None:
        """A sequence takes the slot, with the N and D it had when it was preempted, if it was."""
        self.regime.newcomers += 1
        self.statistics[:, slot] = 0.0
        self._risen[slot] = 0.0
        self.estimate[:, slot] = self.prior if estimate is None else estimate
        self._held.enter(slot, self.survival(np.array([slot]), self.config.k))

    def leave(self, slot: int) -> None:
        """It leaves the slot, finished or preempted."""
        gained, tried = self._tally.drop(slot)
        self.statistics[estimator.FRESH_ACCEPTED, slot] += gained
        self.statistics[estimator.FRESH_TRIALS, slot] += tried
        self._fold(np.array([slot]), _FLEET_TRIALS)

    # ---- steps --------------------------------------------------------------------------------

    def due(self, num_rows: int) -> Due:
        """What this plan, of that many decoding rows, asks of `choose`; once a plan."""
        return self.regime.due(num_rows, self._held.pace)

    def choose(
        self,
        due: Due,
        rows: Rows,
        caps: np.ndarray,
        lag: np.ndarray,
        budget_tokens: int,
        room: Callable[[], Room],
    ) -> np.ndarray | None:
        """k of each decoding row, int32 [rows], or None if nobody drafts.

        `rows` selects slots; `caps` is int32 [rows], what request and context allow; `lag` int32
        [rows], how many tokens the drafter's KV is behind (the canary is who costs least). At most
        `budget_tokens` are drafted; the rest of what there is `room` for is asked only if it
        matters.
        """
        if due is Due.NOTHING:
            return None
        if due is Due.CANARY:
            return self._canary(caps, lag, budget_tokens)
        if self._wants_plain_step(len(caps)):
            return None
        held = self._held.get(rows, caps, budget_tokens) if self.regime.on else None
        if held is not None:
            return held if self._held.drafts else None
        num_drafts = self._decide(rows, caps, lag, budget_tokens, room())
        self._held.set(rows, num_drafts, budget_tokens, self._threshold, self._plain_s)
        if num_drafts is None:
            return None
        return self._with_probes(rows, num_drafts, caps, lag, budget_tokens)

    def rests(self, *, num_rows: int, drafted: bool) -> bool:
        """Counts a step that has committed; whether there is nothing to `learn` from it."""
        self._steps += 1
        if drafted:
            self._drafting_steps += 1
            return False
        self._plain_steps = 1 if self._drafting_steps else self._plain_steps + 1
        self._drafting_steps, self._plain_rows = 0, num_rows
        self._undrifted_steps += 1
        if not self.regime.on:
            return self._steps % (_COST_STEPS * self._held.pace) != 0
        return self._plain_steps > 1 and self._steps % self._held.steps != 0

    def wants_prices(self, *, drafted: bool) -> bool:
        """Whether `learn` should be told what this step cost."""
        return not drafted or self._steps % self._held.steps == 0

    def learn(
        self,
        rows: Rows,
        num_drafted: np.ndarray,
        num_accepted: np.ndarray,
        cost: StepCost | None,
        evidence: np.ndarray | None = None,
    ) -> None:
        """From a step that has committed. `rows` selects slots, int32 [rows] each; `cost` may be
        None where the step has drafted; `evidence` as in `estimator.observe`."""
        if cost is not None:
            self.costs.observe(cost.load, cost.draft_s, cost.target_s)
            if not cost.load.depth:
                return
            self._depths.observe(self.estimate[:, rows], num_drafted, num_accepted)
        if not self.regime.on:
            self._hear(rows, num_drafted, num_accepted, evidence)
            return
        gained = num_accepted if evidence is None else evidence
        self._tally.add(rows, num_accepted, num_accepted < num_drafted, gained)
        if self._tally.steps >= self._held.steps:
            self._folded_steps += self._tally.steps
            self._learn_tally()
            if self._folded_steps >= _FOLD_STEPS:
                self._folded_steps = 0
                self._fold(rows, _FLEET_TRIALS)

    def overhear(self, slots: np.ndarray, trials: np.ndarray, hits: np.ndarray) -> None:
        """What the drafters of rows at k = 0 would have scored (`plan.ShadowEvidence`), int32 [n].
        While off, rows that turn out better count as newcomers: they may draft well, too."""
        self._learn_tally()
        self._drift()
        before = self.estimate[:, slots]
        after = lookahead.overhear(self.config, before, trials, hits)
        self.estimate[:, slots] = after
        self.statistics[estimator.FRESH_ACCEPTED, slots] += hits
        self.statistics[estimator.FRESH_TRIALS, slots] += trials
        self._risen[slots] += after[0] / after[1] - before[0] / before[1]
        better = slots[self._risen[slots] > _NEWS]
        self._risen[better] = 0.0
        self.regime.newcomers += len(better)

    def survival(self, rows: Rows, depth: int) -> np.ndarray:
        """What is believed of the next drafts of these slots, float64 [rows, depth]."""
        accepted, trials = self.estimate[:, rows]
        return lookahead.survival(accepted, trials, depth, self._depths.odds)

    @property
    def outlook(self) -> Outlook:
        drafts = self.regime.on and self._tokens_per_s is not None
        return Outlook(
            drafting=self.regime.on,
            price=self._threshold if drafts else None,
            tokens_per_s=self._tokens_per_s if drafts else None,
            gain=self._gain if drafts else None,
            calibration=self._depths.calibration,
        )

    # ---- inside -------------------------------------------------------------------------------

    def _wants_plain_step(self, num_rows: int) -> bool:
        if not self.regime.on or self._drafting_steps < _FIRST_PLAIN_STEPS:
            return False
        if not 2 * self._plain_rows <= 3 * num_rows <= 5 * self._plain_rows:
            self._plain_gap = _FIRST_PLAIN_STEPS
        most = _PLAIN_STEPS_BELOW_GAIN if self._gain < _SMALL_GAIN else _PLAIN_STEPS
        if self._drafting_steps < min(self._plain_gap, most):
            return False
        self._plain_gap = min(self._plain_gap, most) + _FIRST_PLAIN_STEPS
        return True

    def _decide(
        self, rows: Rows, caps: np.ndarray, lag: np.ndarray, budget_tokens: int, room: Room
    ) -> np.ndarray | None:
        self._learn_tally()
        self._drift()
        self._risen[:] = 0.0
        depth = int(np.maximum.reduce(caps, initial=0))
        most = min(budget_tokens, depth * len(caps))
        if most <= 0:
            self.regime.judge(0.0, len(caps))
            return None
        prices = self.costs.prices(len(caps), room.base_tokens, room.context_tokens, most)
        # Optimism: a price that is too high would never be corrected, one too low soon is.
        prices = prices.cheaper(self.costs.doubt(len(caps)))
        self._plain_s = float(prices.step_s[0])
        survival = self.survival(rows, depth)
        debts_s = _debts_s(lag, room, prices.ingest_s)
        decision = goodput.decide(survival, caps, prices, self._market, room.blocks, debts_s)
        self._market, self._gain = decision.market, decision.gain
        self._threshold, self._tokens_per_s = decision.threshold, decision.tokens_per_s
        was_on = self.regime.on
        carried_out = self.regime.judge(decision.gain, len(caps))
        if was_on and not self.regime.on:
            self._fold(rows, _FLEET_TRIALS)
        return decision.num_drafts if carried_out else None

    def _with_probes(
        self,
        rows: Rows,
        num_drafts: np.ndarray,
        caps: np.ndarray,
        lag: np.ndarray,
        budget_tokens: int,
    ) -> np.ndarray:
        """The decision, with one draft for a few rows that have had none for long."""
        idle = self.statistics[estimator.IDLE_STEPS, rows]
        idle = np.where(num_drafts > 0, 0.0, idle + self._held.steps)
        self.statistics[estimator.IDLE_STEPS, rows] = idle
        if np.maximum.reduce(idle) >= 1:
            left = max(budget_tokens - int(np.add.reduce(num_drafts)), 0)
            most_probes = min(left, 1 + int(_PROBE_SHARE * len(caps)))
            due = probes(idle, self._held.steps, self._steps % len(caps), most_probes)
            due = due[(lag[due] <= _PROBE_LAG_TOKENS) | (idle[due] >= MOST_PROBE_STEPS)]
            if len(due):
                num_drafts = num_drafts.copy()
                num_drafts[due] = np.minimum(caps[due], 1)
        return num_drafts

    def _canary(self, caps: np.ndarray, lag: np.ndarray, budget_tokens: int) -> np.ndarray | None:
        """A few drafts for the row whose drafter is least behind."""
        can = (caps > 0).nonzero()[0]
        if not len(can):
            return None
        row = can[lag[can].argmin()]
        num_drafts = np.zeros(len(caps), dtype=np.int32)
        num_drafts[row] = min(int(caps[row]), _CANARY_DRAFTS, max(budget_tokens, 0))
        return num_drafts

    def _learn_tally(self) -> None:
        """Tell the estimator of what was tallied."""
        if not self._tally.steps:
            return
        self._drift()
        slots, (accepted, rejected, gained), steps = self._tally.take()
        self.statistics[:, slots] = estimator.update(
            self.config, self.statistics[:, slots], accepted, rejected, gained, self.prior, steps
        )
        # A probe that found something asks for the next one at once.
        soon = np.where(accepted > 0, FIRST_PROBE_STEPS - self._held.steps, np.inf)
        idle = self.statistics[estimator.IDLE_STEPS, slots]
        self.statistics[estimator.IDLE_STEPS, slots] = np.minimum(idle, soon)

    def _hear(
        self,
        rows: Rows,
        num_drafted: np.ndarray,
        num_accepted: np.ndarray,
        evidence: np.ndarray | None,
    ) -> None:
        """While off, a canary speaks for the fleet; the others go on as they were."""
        self._learn_tally()
        self._undrifted_steps += 1
        sang = (num_drafted > 0).nonzero()[0]
        slots = np.arange(self.statistics.shape[1])[rows][sang]
        self.statistics[:, slots] = estimator.observe(
            self.config,
            self.statistics[:, slots],
            num_drafted[sang],
            num_accepted[sang],
            self.prior,
            None if evidence is None else evidence[sang],
        )
        before = self.fleet.means / self.fleet.weight
        self._fold(slots, _CANARY_TRIALS)
        self.regime.heard(better=self.fleet.means / self.fleet.weight > before)

    def _drift(self) -> None:
        """Steps without drafts bring every slot closer to the prior; applied when it matters."""
        if self._undrifted_steps:
            self.estimate[:] = estimator.drift(
                self.config, self.estimate, self.prior, self._undrifted_steps
            )
            self._undrifted_steps = 0

    def _fold(self, rows: Rows, memory_trials: float) -> None:
        """Give the fleet the evidence of these slots that it has not had."""
        fresh = slice(estimator.FRESH_ACCEPTED, estimator.FRESH_TRIALS + 1)
        accepted, trials = self.statistics[fresh, rows]
        self.fleet = self.fleet.fold(accepted, trials, memory_trials)
        self.prior = self.fleet.sums()
        self.statistics[fresh, rows] = 0.0
