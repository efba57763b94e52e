"""What a step is made of, from the plans alone: a few numbers for each slot, kept as plans come.

They are plain numbers in lists, and so are their sums: up to some two hundred rows that is faster
than arrays, whose every operation costs as much as dozens of additions.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.plan import Admission, StepPlan
from sim.costs import IDLE_LEFT, StepWork


class SlotCounts:
    """By slot: how many tokens of its request are known, and how many of these are not in KV."""

    def __init__(self, max_slots: int) -> None:
        self.num_tokens = [0] * max_slots
        self.todo = [0] * max_slots
        self._since_prefill = 0  # steps that have come after the last chunk
        self._idle_s = 0.0

    def admit(self, admission: Admission) -> None:
        self.num_tokens[admission.slot] = len(admission.tokens)
        self.todo[admission.slot] = len(admission.tokens) - admission.kv_len_tokens

    def idle(self, seconds: float) -> None:
        """Nothing has run for so long."""
        self._idle_s = seconds

    def known(self, slots: list[int]) -> list[int]:
        """How many tokens each of them knows."""
        return [self.num_tokens[slot] for slot in slots]

    def work(self, plan: StepPlan, num_drafts: np.ndarray) -> StepWork:
        """Composition of the next step, in which the rows draft `num_drafts` of what was planned. A
        row decodes if one of its known tokens is not in KV."""
        slots, query = plan.slots.tolist(), plan.query_lens
        known, todo = self.known(slots), [self.todo[slot] for slot in slots]
        rows = len(slots)
        work = StepWork(rows=rows, admitted=len(plan.deltas.admitted))
        work.decode_rows = todo.count(1)
        self._since_prefill = self._since_prefill + 1 if work.decode_rows == rows else 0
        work.steps_since_prefill, work.idle_s = self._since_prefill, self._idle_s
        self._idle_s *= IDLE_LEFT
        work.ingested_tokens = sum(plan.catch_up.tolist())
        drafts = any(num_drafts.tolist())
        if work.decode_rows == rows and not drafts:
            work.decode_tokens = work.logit_tokens = rows
            _read(work, known)
            work.decode_pairs = work.decode_context_tokens
            return work
        if num_drafts is not plan.num_drafts:
            query = query - plan.num_drafts + num_drafts
        if not drafts and todo[: work.decode_rows].count(1) == work.decode_rows:
            _add_rows(work, known, todo, query.tolist())
            work.logit_tokens = sum(plan.wants_logits.tolist())
            return work
        todos = np.array(todo)
        kv_len = np.array(known) - todos
        context = kv_len + query
        if drafts:
            work.draft_depth = max(num_drafts.tolist())
            work.draft_tokens = sum(num_drafts.tolist())
            work.draft_context_tokens = sum(kv_len[num_drafts > 0].tolist())
        work.logit_tokens = sum(plan.wants_logits.tolist()) + work.draft_tokens
        # Row i's queries see kv_len + 1, ..., kv_len + query positions: of long chunks more than
        # int32 holds.
        pairs = query * kv_len + query.astype(np.int64) * (query + 1) // 2
        if work.decode_rows == rows:
            work.decode_tokens = rows + work.draft_tokens
            work.decode_pairs = sum(pairs.tolist())
            _read(work, context.tolist())
            return work
        if work.decode_rows:
            decodes = todos == 1
            work.decode_tokens = sum(query[decodes].tolist())
            work.decode_pairs = sum(pairs[decodes].tolist())
            _read(work, context[decodes].tolist())
        work.prefill_tokens = sum(query.tolist()) - work.decode_tokens
        work.prefill_context_tokens = sum(context.tolist()) - work.decode_context_tokens
        work.prefill_pairs = sum(pairs.tolist()) - work.decode_pairs
        return work

    def decoding(self, known: list[int]) -> StepWork:
        """Composition of the next step, in which rows with so many known tokens decode one each."""
        rows = len(known)
        work = StepWork(rows=rows, decode_rows=rows, decode_tokens=rows, logit_tokens=rows)
        work.steps_since_prefill, work.idle_s = self._since_prefill + 1, self._idle_s
        _read(work, known)
        work.decode_pairs = work.decode_context_tokens
        return work

    def advance(self, plan: StepPlan, accepted: np.ndarray, emitted: np.ndarray) -> None:
        """A chunk moves its tokens into KV; a decode those it emitted, so that one stays to do."""
        computed = plan.query_lens
        if accepted is not plan.num_drafts:
            computed = computed - plan.num_drafts + accepted
        rows = zip(plan.slots.tolist(), emitted.tolist(), computed.tolist(), strict=True)
        for slot, new, moved in rows:
            self.num_tokens[slot] += new
            self.todo[slot] += new - moved

    def advance_all(self, slots: list[int], steps: int) -> None:
        """So many steps in which all of `slots` decoded one token each."""
        self._since_prefill += steps
        self._idle_s *= IDLE_LEFT**steps
        for slot in slots:
            self.num_tokens[slot] += steps


def _add_rows(work: StepWork, known: list[int], todo: list[int], query: list[int]) -> None:
    """Decodes of one token each, as many as `work` has, and chunks behind them, which are few."""
    decodes = work.decode_tokens = work.decode_rows
    if decodes:
        _read(work, known[:decodes])
        work.decode_pairs = work.decode_context_tokens
    for row in range(decodes, len(known)):
        kv_len, tokens = known[row] - todo[row], query[row]
        work.prefill_tokens += tokens
        work.prefill_context_tokens += kv_len + tokens
        work.prefill_pairs += tokens * kv_len + tokens * (tokens + 1) // 2


def _read(work: StepWork, read: list[int]) -> None:
    work.decode_context_tokens = sum(read)
    work.decode_longest_tokens = max(read)
    work.decode_shortest_tokens = min(read)
