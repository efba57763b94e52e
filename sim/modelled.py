"""The fast executor: answers a plan from a cost model and an acceptance model, vectorised by rows.

It keeps a few numbers for each slot and checks nothing: `sim.executor` is the one that checks, and
a test compares the two plan by plan. Tokens count upwards from a request's last prompt token, so a
session whose next prompt goes on in the same numbering finds its own output in the prefix cache.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.plan import Deltas, StepPlan, StepResult
from sim.acceptance import AcceptanceModel
from sim.composition import SlotCounts
from sim.costs import CostModel, StepWork

_ONE = np.array(1, dtype=np.int32)


class ModelledExecutor:
    """`run(plan)` for a serial loop. Durations are in the result; it has no clock."""

    def __init__(
        self, *, max_slots: int, cost: CostModel, acceptance: AcceptanceModel | None = None
    ) -> None:
        """`acceptance` may be None where nobody drafts."""
        self._cost = cost
        self._acceptance = acceptance
        self._counts = SlotCounts(max_slots)
        self._first_token = np.zeros(max_slots, np.int64)  # by slot, as if it had counted from 0
        # Shared by the results of steps in which every row emits one token.
        self._ramp = np.arange(max_slots + 1, dtype=np.int32)
        self._ok = np.zeros(max_slots, np.uint8)
        self._steady: _Steady | None = None
        self.host_s = 0.0  # of the last step, where the cost model tells it apart

    def run(self, plan: StepPlan) -> StepResult:
        steady = self._steady
        if steady is not None:
            if plan.slots is steady.slots and steady.goes_on(plan):
                return self._run_steady(steady, plan)
            self._leave_steady(steady)
        if plan.deltas.admitted:
            self._admit(plan.deltas)
        return self._run_any(plan)

    # -- a run of steps in which the same rows decode one token each

    def _run_steady(self, steady: _Steady, plan: StepPlan) -> StepResult:
        steady.steps += 1
        work = steady.work
        work.decode_context_tokens = work.decode_pairs = work.decode_context_tokens + steady.rows
        work.decode_longest_tokens += 1
        work.decode_shortest_tokens += 1
        steady.tokens = steady.tokens + _ONE  # anew: the one before may be in a commit
        draft_s, target_s, self.host_s = self._cost.step_s(work)
        return StepResult(
            plan.step_id,
            plan.generations,
            steady.tokens,
            steady.row_splits,
            plan.num_drafts,
            plan.num_drafts,
            steady.status,
            draft_s,
            target_s,
        )

    def _leave_steady(self, steady: _Steady) -> None:
        self._counts.advance_all(steady.slots, steady.steps)
        self._steady = None

    # -- any step

    def _admit(self, deltas: Deltas) -> None:
        for a in deltas.admitted:
            self._counts.admit(a)
            self._first_token[a.slot] = int(a.tokens[-1]) + 1 - len(a.tokens)
            if self._acceptance is not None:
                self._acceptance.admit(a)

    def _run_any(self, plan: StepPlan) -> StepResult:
        slots, drafted = plan.slots, plan.num_drafts
        work = self._counts.work(plan, drafted)
        accepted = drafted
        known = self._counts.num_tokens[slots]
        first = self._first_token[slots] + known
        plain = work.decode_rows == work.rows and not work.draft_tokens
        if plain:
            splits = self._ramp[: work.rows + 1]
            tokens = first.astype(np.int32)
            self._counts.advance_all(slots, 1)
        else:
            if work.draft_tokens:
                accepted = self._accept(slots, known, drafted)
            emitted = accepted + plan.wants_logits
            splits = np.zeros(work.rows + 1, np.int32)
            np.add.accumulate(emitted, out=splits[1:])
            first -= splits[:-1]
            tokens = (first.repeat(emitted) + np.arange(splits[-1])).astype(np.int32)
            self._counts.advance(plan, accepted, emitted)
        draft_s, target_s, self.host_s = self._cost.step_s(work)
        status = self._ok[: work.rows]
        if plain:
            self._steady = _Steady(plan, work, tokens, splits, status)
            work.admitted = work.ingested_tokens = 0
        return StepResult(
            plan.step_id,
            plan.generations,
            tokens,
            splits,
            drafted,
            accepted,
            status,
            draft_s,
            target_s,
        )

    def _accept(self, slots: np.ndarray, known: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        if self._acceptance is None:
            raise ValueError("acceptance: is None, but the plan drafts; give a model of it")
        return self._acceptance.num_accepted(slots, known, drafted)


class _Steady:
    """What stays the same while the same rows decode, and what counts on."""

    def __init__(
        self,
        plan: StepPlan,
        work: StepWork,
        tokens: np.ndarray,
        row_splits: np.ndarray,
        status: np.ndarray,
    ) -> None:
        self.slots = plan.slots
        self.rows = len(plan.slots)
        self.work = work
        self.tokens = tokens
        self.row_splits = row_splits
        self.status = status
        self.steps = 0  # since the slots' own counts were brought up to date
        self._num_drafts = plan.num_drafts
        self._query_lens = plan.query_lens

    def goes_on(self, plan: StepPlan) -> bool:
        """The planner hands out the same arrays as long as rows and drafts are the same; where it
        does not, the general way costs time and gives the same."""
        return (
            plan.num_drafts is self._num_drafts
            and plan.query_lens is self._query_lens
            and plan.catch_up is plan.num_drafts
            and not plan.deltas.admitted
        )
