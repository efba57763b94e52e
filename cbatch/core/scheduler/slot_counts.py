"""The composition of steps, computed from their plans.

Counts are in lists: up to some two hundred rows they are faster than numpy arrays.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.step_work import StepWork
from cbatch.core.scheduler.plan import NewSequence, StepPlan


class SlotCounts:
    """Token counts of each slot, which follow the plans and results of an executor."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_tokens = [0] * max_num_seqs  # known tokens
        self.num_uncomputed = [0] * max_num_seqs  # known tokens that are not in KV

    def admit(self, admission: NewSequence) -> None:
        self.num_tokens[admission.slot] = len(admission.tokens)
        self.num_uncomputed[admission.slot] = len(admission.tokens) - admission.kv_len_tokens

    def known(self, slots: list[int]) -> list[int]:
        """Return the number of known tokens of each slot."""
        return [self.num_tokens[slot] for slot in slots]

    def work(self, plan: StepPlan, num_drafts: np.ndarray) -> StepWork:
        """Return the composition of the next step, in which rows draft `num_drafts` of the planned
        drafts. A row decodes if exactly one known token is not in KV."""
        slots, drafts = plan.slots.tolist(), num_drafts.tolist()
        known, uncomputed = self.known(slots), [self.num_uncomputed[slot] for slot in slots]
        rows, decodes, depth = len(slots), uncomputed.count(1), max(drafts)
        work = StepWork(rows=rows, decode_rows=decodes)
        work.admitted = len(plan.deltas.new_sequences)
        work.ingested_tokens = sum(plan.catch_up.tolist())
        # Number of leading rows that decode without drafts; each reads all its known tokens.
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
        """Update the counts by the result of a step: accepted drafts and emitted tokens per row. A
        decoding row emits as many tokens as it adds to KV, so that one stays uncomputed."""
        added_to_kv = plan.query_lens
        if accepted is not plan.num_drafts:
            added_to_kv = added_to_kv - plan.num_drafts + accepted
        rows = zip(plan.slots.tolist(), emitted.tolist(), added_to_kv.tolist(), strict=True)
        for slot, new, computed in rows:
            self.num_tokens[slot] += new
            self.num_uncomputed[slot] += new - computed
