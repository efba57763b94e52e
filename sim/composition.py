"""What a step is made of, from the plans alone: a few numbers for each slot, kept as plans come.

Sums are those of lists: up to some two hundred rows they are faster than numpy's.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.plan import Admission, StepPlan
from sim.costs import StepWork

_ONE = np.array(1)  # a Python number costs an array operation a conversion


class SlotCounts:
    """By slot: how many tokens of its request are known, and how many of these are not in KV."""

    def __init__(self, max_slots: int) -> None:
        self.num_tokens = np.zeros(max_slots, np.int64)
        self.todo = np.zeros(max_slots, np.int64)

    def admit(self, admission: Admission) -> None:
        self.num_tokens[admission.slot] = len(admission.tokens)
        self.todo[admission.slot] = len(admission.tokens) - admission.kv_len_tokens

    def work(self, plan: StepPlan, num_drafts: np.ndarray) -> StepWork:
        """Composition of the step, in which the rows draft `num_drafts` of what was planned. A row
        decodes if one of its known tokens is not in KV."""
        slots, query = plan.slots, plan.query_lens
        known, todo = self.num_tokens[slots], self.todo[slots]
        rows = len(slots)
        work = StepWork(rows=rows, admitted=len(plan.deltas.admitted))
        work.decode_rows = todo.tolist().count(1)
        work.ingested_tokens = sum(plan.catch_up.tolist())
        drafts = any(num_drafts.tolist())
        if work.decode_rows == rows and not drafts:
            work.decode_tokens = work.logit_tokens = rows
            _read(work, known.tolist())
            work.decode_pairs = work.decode_context_tokens
            return work
        if num_drafts is not plan.num_drafts:
            query = query - plan.num_drafts + num_drafts
        if not drafts and todo[: work.decode_rows].tolist().count(1) == work.decode_rows:
            _add_rows(work, known.tolist(), todo.tolist(), query.tolist())
            work.logit_tokens = sum(plan.wants_logits.tolist())
            return work
        kv_len = known - todo
        context = kv_len + query
        if drafts:
            work.draft_depth = max(num_drafts.tolist())
            work.draft_tokens = sum(num_drafts.tolist())
            work.draft_context_tokens = sum(kv_len[num_drafts > 0].tolist())
        work.logit_tokens = sum(plan.wants_logits.tolist()) + work.draft_tokens
        # Row i's queries see kv_len + 1, ..., kv_len + query positions.
        pairs = query * kv_len + query * (query + 1) // 2
        if work.decode_rows == rows:
            work.decode_tokens = rows + work.draft_tokens
            work.decode_pairs = sum(pairs.tolist())
            _read(work, context.tolist())
            return work
        if work.decode_rows:
            decodes = todo == _ONE
            work.decode_tokens = sum(query[decodes].tolist())
            work.decode_pairs = sum(pairs[decodes].tolist())
            _read(work, context[decodes].tolist())
        work.prefill_tokens = sum(query.tolist()) - work.decode_tokens
        work.prefill_context_tokens = sum(context.tolist()) - work.decode_context_tokens
        work.prefill_pairs = sum(pairs.tolist()) - work.decode_pairs
        return work

    def decoding(self, slots: np.ndarray) -> StepWork:
        """Composition of a step in which `slots` decode one token each."""
        rows = len(slots)
        work = StepWork(rows=rows, decode_rows=rows, decode_tokens=rows, logit_tokens=rows)
        _read(work, self.num_tokens[slots].tolist())
        work.decode_pairs = work.decode_context_tokens
        return work

    def advance(self, plan: StepPlan, accepted: np.ndarray, emitted: np.ndarray) -> None:
        """A chunk moves its tokens into KV; a decode those it emitted, so that one stays to do."""
        slots = plan.slots
        self.todo[slots] += emitted - (plan.query_lens - plan.num_drafts + accepted)
        self.num_tokens[slots] += emitted

    def advance_all(self, slots: np.ndarray, steps: int) -> None:
        """So many steps in which all of `slots` decoded one token each."""
        self.num_tokens[slots] += steps


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
