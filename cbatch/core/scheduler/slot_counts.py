"""The composition of steps, read off their plans alone.

Plain numbers in lists: up to some two hundred rows that is faster than arrays, whose every
operation costs as much as dozens of additions.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.step_work import IDLE_LEFT, StepWork
from cbatch.core.scheduler.plan import NewSequence, StepPlan


class SlotCounts:
    """By slot: the known tokens of its request, and how many of these are not in KV."""

    def __init__(self, max_slots: int) -> None:
        self.num_tokens = [0] * max_slots
        self.num_uncomputed = [0] * max_slots
        self._since_prefill = 0  # steps after the last chunk
        self._idle_s = 0.0

    def admit(self, admission: NewSequence) -> None:
        self.num_tokens[admission.slot] = len(admission.tokens)
        self.num_uncomputed[admission.slot] = len(admission.tokens) - admission.kv_len_tokens

    def idle(self, seconds: float) -> None:
        """Note that nothing has run for so long."""
        self._idle_s = seconds

    def known(self, slots: list[int]) -> list[int]:
        """Return the known tokens of each."""
        return [self.num_tokens[slot] for slot in slots]

    def work(self, plan: StepPlan, num_drafts: np.ndarray) -> StepWork:
        """Return the composition of the next step, in which the rows draft `num_drafts` of what was
        planned. A row decodes if one of its known tokens is not in KV."""
        slots, drafts = plan.slots.tolist(), num_drafts.tolist()
        known, uncomputed = self.known(slots), [self.num_uncomputed[slot] for slot in slots]
        rows, decodes, depth = len(slots), uncomputed.count(1), max(drafts)
        work = StepWork(rows=rows, decode_rows=decodes)
        work.admitted = len(plan.deltas.new_sequences)
        self._since_prefill = self._since_prefill + 1 if decodes == rows else 0
        work.steps_since_prefill, work.idle_s = self._since_prefill, self._idle_s
        self._idle_s *= IDLE_LEFT
        work.ingested_tokens = sum(plan.catch_up.tolist())
        # The leading rows that decode without drafts: they read all that they know.
        plain = decodes if not depth and uncomputed[:decodes].count(1) == decodes else 0
        if plain == rows:
            work.target_tokens = work.logit_tokens = rows
            work.decode_pairs = work.context_tokens = sum(known)
            work.decode_longest_tokens, work.decode_shortest_tokens = max(known), min(known)
            return work
        new = (plan.query_lens - plan.num_drafts + num_drafts).tolist()
        work.draft_depth, work.draft_tokens = depth, sum(drafts)
        work.target_tokens = sum(new)
        work.logit_tokens = sum(plan.wants_logits.tolist()) + work.draft_tokens
        reads = known[:plain]
        work.decode_pairs = sum(reads)
        for row in range(plain, rows):
            tokens, kv_len = new[row], known[row] - uncomputed[row]
            # Queries see kv_len + 1, ..., kv_len + tokens positions.
            pairs = tokens * kv_len + tokens * (tokens + 1) // 2
            if drafts[row]:
                work.draft_context_tokens += kv_len
            if uncomputed[row] == 1:
                reads.append(kv_len + tokens)
                work.decode_pairs += pairs
            else:
                work.prefill_tokens += tokens
                work.prefill_context_tokens += kv_len + tokens
                work.prefill_pairs += pairs
        work.context_tokens = sum(reads) + work.prefill_context_tokens
        if reads:
            work.decode_longest_tokens, work.decode_shortest_tokens = max(reads), min(reads)
        return work

    def advance(self, plan: StepPlan, accepted: np.ndarray, emitted: np.ndarray) -> None:
        """Move the tokens of a chunk into KV, and of a decode those it emitted, so that one stays
        to compute."""
        computed = plan.query_lens
        if accepted is not plan.num_drafts:
            computed = computed - plan.num_drafts + accepted
        rows = zip(plan.slots.tolist(), emitted.tolist(), computed.tolist(), strict=True)
        for slot, new, moved in rows:
            self.num_tokens[slot] += new
            self.num_uncomputed[slot] += new - moved
