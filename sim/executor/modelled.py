"""The fast executor: answers a plan from a cost model and an acceptance model, vectorised by rows.

It keeps a few numbers for each slot and checks nothing: the tests have one that checks, and compare
the two plan by plan. Tokens count upwards from a request's last prompt
token, so a session whose next prompt goes on in the same numbering finds its own output in the
prefix cache.
"""

from __future__ import annotations

from operator import add

import numpy as np

from cbatch.core.scheduler.plan import Deltas, StepPlan, StepResult
from cbatch.core.speculation.step_work import StepWork
from cbatch.engine.step_meter import SlotCounts
from sim.cost.base import CostModel
from sim.executor.acceptance import AcceptanceModel


class ModelledExecutor:
    """`run(plan)` for a serial loop. Durations are in the result; it has no clock."""

    def __init__(
        self, *, max_slots: int, cost: CostModel, acceptance: AcceptanceModel | None = None
    ) -> None:
        """`acceptance` may be None where nobody drafts."""
        self._cost = cost
        self._acceptance = acceptance
        self._counts = SlotCounts(max_slots)
        self._first_token = [0] * max_slots  # as if its request had counted from 0
        # Shared by the results of steps in which every row emits one token.
        self._ramp = np.arange(max_slots + 1, dtype=np.int32)
        self._ones = np.ones(max_slots, np.int32)
        self._ok = np.zeros(max_slots, np.uint8)
        self._steady: _SteadyDecode | None = None
        self.host_s = 0.0  # of the last step, where the cost model tells it apart

    def idle(self, seconds: float) -> None:
        """Nothing has run for so long."""
        if self._steady is not None:
            self._leave_steady(self._steady)
        self._counts.idle(seconds)

    def run(self, plan: StepPlan) -> StepResult:
        steady = self._steady
        if steady is not None:
            if steady.extended_by(plan):
                return self._run_steady(steady, plan)
            self._leave_steady(steady)
        if plan.deltas.new_sequences:
            self._admit(plan.deltas)
        return self._run_any(plan)

    # -- a run of steps in which the same rows decode one token each

    def _run_steady(self, steady: _SteadyDecode, plan: StepPlan) -> StepResult:
        rows, work = len(steady.slots), steady.work
        draft_s, target_s, self.host_s = self._cost.step_s(work)
        work.go_on()
        tokens = steady.tokens + steady.steps
        steady.steps += 1
        return StepResult(
            plan.step_id,
            plan.generations,
            tokens,
            self._ramp[: rows + 1],
            plan.num_drafts,
            plan.num_drafts,
            self._ok[:rows],
            draft_s,
            target_s,
        )

    def run_ahead(
        self, slots: np.ndarray, most: int, now_s: float, until_s: float
    ) -> tuple[np.ndarray, float, list[float]]:
        """At most so many of the scheduler's `steps_ahead`, up to the first that does not end
        before `until_s`: what they emit, int32 [steps, rows], the target's seconds in all, and when
        each ends."""
        steady = self._steady
        if steady is None or slots is not steady.slots:
            steady = self._enter_steady(slots)
        work, step_s = steady.work, self._cost.step_s
        total_s, ends_s = 0.0, []
        for _ in range(most):
            draft_s, target_s, host_s = step_s(work)
            now_s += draft_s + target_s + host_s
            work.go_on()
            total_s += target_s
            ends_s.append(now_s)
            if now_s >= until_s:
                break
        steps = np.arange(steady.steps, steady.steps + len(ends_s), dtype=np.int32)
        steady.steps += len(ends_s)
        return steady.tokens + steps[:, None], total_s, ends_s

    def _enter_steady(self, slots: np.ndarray) -> _SteadyDecode:
        if self._steady is not None:
            self._leave_steady(self._steady)
        rows = slots.tolist()
        known = self._counts.known(rows)
        work, tokens = self._counts.decodes(known), self._next_tokens(rows, known)
        self._steady = _SteadyDecode(slots, work, tokens)
        return self._steady

    def _leave_steady(self, steady: _SteadyDecode) -> None:
        self._counts.advance_all(steady.slots.tolist(), steady.steps)
        self._steady = None

    def _next_tokens(self, slots: list[int], known: list[int]) -> np.ndarray:
        """int32 [rows], of rows with so many known tokens."""
        firsts = [self._first_token[slot] for slot in slots]
        return np.array(list(map(add, firsts, known)), dtype=np.int32)

    # -- any step

    def _admit(self, deltas: Deltas) -> None:
        for a in deltas.new_sequences:
            self._counts.admit(a)
            self._first_token[a.slot] = int(a.tokens[-1]) + 1 - len(a.tokens)
            if self._acceptance is not None:
                self._acceptance.admit(a)

    def _run_any(self, plan: StepPlan) -> StepResult:
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
        if work.decode_rows == work.rows and not work.draft_tokens:
            work.admitted = work.ingested_tokens = 0
            work.go_on()
            self._steady = _SteadyDecode(plan.slots, work, tokens, plan)
        else:
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

    def _accept(self, slots: np.ndarray, known: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        if self._acceptance is None:
            raise ValueError("acceptance: is None, but the plan drafts; give a model of it")
        return self._acceptance.num_accepted(slots, known, drafted)


class _SteadyDecode:
    """What stays the same while the same rows decode one token each, and what counts on."""

    def __init__(
        self, slots: np.ndarray, work: StepWork, tokens: np.ndarray, first: StepPlan | None = None
    ) -> None:
        """`tokens`, int32 [rows], are those of the first step; if it has been run, by `first`."""
        self.slots, self.tokens, self.first = slots, tokens, first
        self.work = work  # of the next step
        self.steps = 0 if first is None else 1  # that the slots' own counts do not know of

    def extended_by(self, plan: StepPlan) -> bool:
        """The planner hands out the same arrays as long as rows and drafts are the same; where it
        does not, the general way costs time and gives the same."""
        first = self.first
        return (
            first is not None
            and plan.slots is first.slots
            and plan.num_drafts is first.num_drafts
            and plan.query_lens is first.query_lens
            and plan.catch_up is plan.num_drafts
            and not plan.deltas.new_sequences
        )
