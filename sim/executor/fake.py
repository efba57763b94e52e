"""The fake executor: answers plans without a model, vectorised by rows.

It emits the tokens of a token source, accepts drafts as an acceptance model says, and takes
durations from a cost model. It keeps a few numbers for each slot and checks nothing. The tests have
an executor that checks, and compare the two plan by plan.
"""

from __future__ import annotations

from operator import add
from typing import Protocol

import numpy as np

from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.core.scheduler.slot_counts import SlotCounts
from sim.cost.base import CostModel
from sim.executor.acceptance import AcceptanceModel


class TokenSource(Protocol):
    def admit(self, admission: NewSequence) -> None: ...

    def tokens(
        self, slots: list[int], known: list[int], counts: np.ndarray | None, splits: np.ndarray
    ) -> np.ndarray:
        """Return the `counts[i]` tokens after the `known[i]` tokens of each slot, int32, row after
        row; row i begins at `splits[i]`. None: one token each."""


class CountedTokens:
    """Tokens that count upwards from a request's last prompt token. So a session whose next prompt
    continues the numbering finds its own output in the prefix cache."""

    def __init__(self, max_num_seqs: int) -> None:
        # By slot: id of the next token, minus the number of known tokens.
        self._first_token = [0] * max_num_seqs

    def admit(self, admission: NewSequence) -> None:
        tokens = admission.tokens
        self._first_token[admission.slot] = int(tokens[-1]) + 1 - len(tokens)

    def tokens(
        self, slots: list[int], known: list[int], counts: np.ndarray | None, splits: np.ndarray
    ) -> np.ndarray:
        firsts = [self._first_token[slot] for slot in slots]
        tokens = np.array(list(map(add, firsts, known)), dtype=np.int32)
        if counts is None:
            return tokens
        return (tokens - splits[:-1]).repeat(counts) + np.arange(splits[-1], dtype=np.int32)


class FakeExecutor:
    """Executor of a serial loop: `run(plan)` returns a result with durations. It has no clock."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        cost: CostModel,
        acceptance: AcceptanceModel | None = None,
        tokens: TokenSource | None = None,
    ) -> None:
        """`acceptance` may be None if no plan drafts. `tokens`: `CountedTokens` by default."""
        self._cost, self._acceptance = cost, acceptance
        self._tokens = CountedTokens(max_num_seqs) if tokens is None else tokens
        self._counts = SlotCounts(max_num_seqs)
        # Shared by the results of steps in which every row emits one token.
        self._ramp = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._ones = np.ones(max_num_seqs, np.int32)
        self._ok = np.zeros(max_num_seqs, np.uint8)
        self.host_s = 0.0  # host time of the last step, if the cost model separates it

    def check(self, request: object) -> None:
        """Refuse nothing."""

    def idle(self, seconds: float) -> None:
        """No step ran for `seconds` before the next step, which costs nothing here."""

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.deltas.new_sequences:
            self._admit(admission)
        slots = plan.slots.tolist()
        known = self._counts.known(slots)
        acceptance, drafted = self._acceptance, plan.num_drafts
        if acceptance is not None:
            drafted = acceptance.num_drafted(plan, known)
        work, accepted = self._counts.work(plan, drafted), drafted
        if work.draft_tokens or work.logit_tokens < work.rows:
            if work.draft_tokens:
                if acceptance is None:
                    problem = "is None, but the plan has drafts; give an acceptance model"
                    raise ValueError(f"acceptance: {problem}")
                accepted = acceptance.num_accepted(plan.slots, np.array(known), drafted)
            emitted = accepted + plan.wants_logits
            splits = np.zeros(work.rows + 1, np.int32)
            np.add.accumulate(emitted, out=splits[1:])
            tokens = self._tokens.tokens(slots, known, emitted, splits)
        else:
            emitted, splits = self._ones[: work.rows], self._ramp[: work.rows + 1]
            tokens = self._tokens.tokens(slots, known, None, splits)
        draft_s, target_s, self.host_s = self._cost.step_s(work)
        self._counts.advance(plan, accepted, emitted)
        draft_kv_lens = None
        if acceptance is not None:
            draft_kv_lens = acceptance.draft_kv_lens(plan, lambda: self._kv_lens(slots))
        return StepResult(
            step_id=plan.step_id,
            generations=plan.generations,
            tokens=tokens,
            row_splits=splits,
            num_drafted=drafted,
            num_accepted=accepted,
            status=self._ok[: work.rows],
            draft_s=draft_s,
            target_s=target_s,
            draft_kv_lens=draft_kv_lens,
        )

    def _kv_lens(self, slots: list[int]) -> list[int]:
        counts = self._counts
        return [counts.num_tokens[slot] - counts.num_uncomputed[slot] for slot in slots]

    def _admit(self, admission: NewSequence) -> None:
        self._counts.admit(admission)
        self._tokens.admit(admission)
        if self._acceptance is not None:
            self._acceptance.admit(admission)
