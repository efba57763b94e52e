"""The fast executor: answers a plan from a cost model and an acceptance model, vectorised by rows.

It keeps a few numbers for each slot and checks nothing. The tests have an executor that checks, and
compare the two plan by plan. Output tokens count upwards from a request's last prompt token. So a
session whose next prompt continues the numbering finds its own output in the prefix cache.
"""

from __future__ import annotations

from operator import add

import numpy as np

from cbatch.core.scheduler.plan import Deltas, StepPlan, StepResult
from cbatch.core.scheduler.slot_counts import SlotCounts
from sim.cost.base import CostModel
from sim.executor.acceptance import AcceptanceModel


class ModelledExecutor:
    """Executor of a serial loop: `run(plan)` returns a result with durations. It has no clock."""

    def __init__(
        self, *, max_num_seqs: int, cost: CostModel, acceptance: AcceptanceModel | None = None
    ) -> None:
        """`acceptance` may be None if no plan drafts."""
        self._cost = cost
        self._acceptance = acceptance
        self._counts = SlotCounts(max_num_seqs)
        # By slot: id of the next token, minus the number of known tokens.
        self._first_token = [0] * max_num_seqs
        # Shared by the results of steps in which every row emits one token.
        self._ramp = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._ones = np.ones(max_num_seqs, np.int32)
        self._ok = np.zeros(max_num_seqs, np.uint8)
        self.host_s = 0.0  # host time of the last step, if the cost model separates it

    def check(self, request: object) -> None:
        """Refuse nothing."""

    def idle(self, seconds: float) -> None:
        """Record that no step ran for `seconds` before the next step."""
        self._counts.idle(seconds)

    def run(self, plan: StepPlan) -> StepResult:
        if plan.deltas.new_sequences:
            self._admit(plan.deltas)
        slots, drafted = plan.slots.tolist(), plan.num_drafts
        work = self._counts.work(plan, drafted)
        accepted = drafted
        known = self._counts.known(slots)
        tokens = self._next_tokens(slots, known)
        emitted, splits = self._ones[: work.rows], self._ramp[: work.rows + 1]
        if work.draft_tokens or work.logit_tokens < work.rows:
            if work.draft_tokens:
                accepted = self._accept(plan.slots, np.array(known), drafted)
            emitted = accepted + plan.wants_logits
            splits = np.zeros(work.rows + 1, np.int32)
            np.add.accumulate(emitted, out=splits[1:])
            first = tokens - splits[:-1]
            tokens = first.repeat(emitted) + np.arange(splits[-1], dtype=np.int32)
        draft_s, target_s, self.host_s = self._cost.step_s(work)
        status = self._ok[: work.rows]
        self._counts.advance(plan, accepted, emitted)
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

    def _next_tokens(self, slots: list[int], known: list[int]) -> np.ndarray:
        """Return the token id after the `known` tokens of each slot, int32 [rows]."""
        firsts = [self._first_token[slot] for slot in slots]
        return np.array(list(map(add, firsts, known)), dtype=np.int32)

    def _admit(self, deltas: Deltas) -> None:
        for a in deltas.new_sequences:
            self._counts.admit(a)
            self._first_token[a.slot] = int(a.tokens[-1]) + 1 - len(a.tokens)
            if self._acceptance is not None:
                self._acceptance.admit(a)

    def _accept(self, slots: np.ndarray, known: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        if self._acceptance is None:
            raise ValueError(
                "acceptance: is None, but the plan has drafts; give an acceptance model"
            )
        return self._acceptance.num_accepted(slots, known, drafted)
