"""The fast executor: answers a plan from a cost model and an acceptance model, vectorised by rows.

It keeps a few numbers for each slot and checks nothing: `sim.executor` is the one that checks, and
a test compares the two plan by plan. Tokens count upwards from a request's last prompt token, so a
session whose next prompt goes on in the same numbering finds its own output in the prefix cache.
"""

from __future__ import annotations

import math
from operator import add

import numpy as np

from cbatch.core.plan import Deltas, QuietSteps, StepPlan, StepResult
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
        self._first_token = [0] * max_slots  # as if its request had counted from 0
        # Shared by the results of steps in which every row emits one token.
        self._ramp = np.arange(max_slots + 1, dtype=np.int32)
        self._ones = np.ones(max_slots, np.int32)
        self._ok = np.zeros(max_slots, np.uint8)
        self._steady: _Steady | None = None
        self.host_s = 0.0  # of the last step, where the cost model tells it apart

    def foresee(self, quiet: QuietSteps, now_s: float, until_s: float | None) -> list[float]:
        """When the coming steps will end: of the quiet ones those that begin before `until_s`
        (None: all), and the first in any case. The next plan must stand for exactly these."""
        steady = self._steady
        if steady is None or steady.slots is not quiet.slots:
            if steady is not None:
                self._leave_steady(steady)
            steady = self._steady = self._enter_steady(quiet.slots)
        return steady.foresee(self._cost, quiet.num_steps, now_s, until_s)

    def idle(self, seconds: float) -> None:
        """Nothing has run for so long."""
        if self._steady is not None:
            self._leave_steady(self._steady)
        self._counts.idle(seconds)

    def run(self, plan: StepPlan) -> StepResult:
        steady = self._steady
        if steady is not None:
            if plan.slots is steady.slots and steady.goes_on(plan):
                return self._run_steady(steady, plan)
            self._leave_steady(steady)
        if plan.deltas.admitted:
            self._admit(plan.deltas)
        plan.require_one_step()
        return self._run_any(plan)

    # -- a run of steps in which the same rows decode one token each

    def _run_steady(self, steady: _Steady, plan: StepPlan) -> StepResult:
        if not steady.num_foreseen:
            steady.foresee(self._cost, 1, 0.0, None)
        num_steps, rows = steady.num_foreseen, len(steady.slots)
        if num_steps != plan.num_steps:
            raise ValueError(f"num_steps: {plan.num_steps}, but {num_steps} were foreseen")
        steps, tokens, splits = steady.steps, steady.tokens, self._ramp[: rows + 1]
        if num_steps > 1:
            later = np.arange(steps, steps + num_steps, dtype=np.int32)
            tokens = (tokens[:, None] + later).ravel()
            splits = np.arange(0, rows * num_steps + 1, num_steps, dtype=np.int32)
        elif steps:
            tokens = tokens + steps
        steady.steps = steps + num_steps
        steady.num_foreseen = 0
        steady.first = plan
        self.host_s = steady.host_s
        return StepResult(
            plan.step_id,
            plan.generations,
            tokens,
            splits,
            plan.num_drafts,
            plan.num_drafts,
            self._ok[:rows],
            steady.draft_s,
            steady.target_s,
        )

    def _enter_steady(self, slots: np.ndarray) -> _Steady:
        rows = slots.tolist()
        known = self._counts.known(rows)
        return _Steady(slots, self._counts.decoding(known), self._next_tokens(rows, known))

    def _leave_steady(self, steady: _Steady) -> None:
        if steady.steps:
            self._counts.advance_all(steady.slots.tolist(), steady.steps)
        self._steady = None

    def _next_tokens(self, slots: list[int], known: list[int]) -> np.ndarray:
        """int32 [rows], of rows with so many known tokens."""
        firsts = [self._first_token[slot] for slot in slots]
        return np.array(list(map(add, firsts, known)), dtype=np.int32)

    # -- any step

    def _admit(self, deltas: Deltas) -> None:
        for a in deltas.admitted:
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
        self._counts.advance(plan, accepted, emitted)
        draft_s, target_s, self.host_s = self._cost.step_s(work)
        status = self._ok[: work.rows]
        if work.decode_rows == work.rows and not work.draft_tokens:
            work.admitted = work.ingested_tokens = 0
            work.go_on()
            self._steady = _Steady(plan.slots, work, tokens + _ONE)
            self._steady.first = plan
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

    def __init__(self, slots: np.ndarray, work: StepWork, tokens: np.ndarray) -> None:
        self.slots = slots
        self.work = work  # of the next step
        self.tokens = tokens  # int32 [rows], that its first step emits
        self.steps = 0  # since the slots' own counts were brought up to date
        # Steps that are priced and still to be run: how many, their sums, and the last one's.
        self.num_foreseen = 0
        self.draft_s = self.target_s = self.host_s = 0.0
        self.first: StepPlan | None = None  # the plan that it began with

    def foresee(
        self, cost: CostModel, most_steps: int, now_s: float, until_s: float | None
    ) -> list[float]:
        """Prices the next steps, at most so many; see `ModelledExecutor.foresee`."""
        ends_s: list[float] = []
        work, draft_s, target_s, host_s = self.work, 0.0, 0.0, 0.0
        stop_s = math.inf if until_s is None else until_s
        for _ in range(most_steps):
            step_draft_s, step_target_s, host_s = cost.step_s(work)
            draft_s += step_draft_s
            target_s += step_target_s
            now_s += step_draft_s + step_target_s + host_s
            ends_s.append(now_s)
            work.go_on()
            if now_s >= stop_s:
                break
        self.num_foreseen = len(ends_s)
        self.draft_s, self.target_s, self.host_s = draft_s, target_s, host_s
        return ends_s

    def goes_on(self, plan: StepPlan) -> bool:
        """The planner hands out the same arrays as long as rows and drafts are the same; where it
        does not, the general way costs time and gives the same."""
        first = self.first
        return self.num_foreseen > 0 or (
            first is not None
            and plan.num_drafts is first.num_drafts
            and plan.query_lens is first.query_lens
            and plan.catch_up is plan.num_drafts
            and not plan.deltas.admitted
        )
