"""Prompts in a step: chunks of those that are being computed, and who is admitted."""

from __future__ import annotations

import msgspec

from cbatch.core.scheduler.state import SchedulerState


class Chunk(msgspec.Struct, frozen=True):
    """A prefilling row: its next `query_len` tokens; `last` if they reach the last known one."""

    slot: int
    query_len: int
    last: bool


class PrefillScheduler:
    """Asked once a plan each, after the decoding rows have their tokens and blocks."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def schedule_chunks(self, budget_tokens: int) -> list[Chunk]:
        """Of the rows that prefill, in order of admission."""
        chunks = []
        for slot in self.state.prefilling:
            if budget_tokens <= 0:
                break
            sequence = self.state.owners[slot]
            assert sequence is not None
            if sequence.pending_preemption:
                continue
            chunk = self._chunk(slot, budget_tokens)
            chunks.append(chunk)
            budget_tokens -= chunk.query_len
        return chunks

    def _chunk(self, slot: int, budget_tokens: int) -> Chunk:
        left = int(self.state.table.num_uncomputed_tokens[slot])
        for flight in self.state.flights:  # exact, since a prefilling row drafts nothing
            left -= int(flight.plan.query_lens[flight.plan.slots == slot].sum())
        return Chunk(slot, min(left, budget_tokens), last=left <= budget_tokens)

    def admit(self, budget_tokens: int) -> list[Chunk]:
        """Of the waiting sequences that enter now, in service order (see scheduler.py)."""
        state, pool = self.state, self.state.pool
        chunks: list[Chunk] = []
        cached = False  # what running sequences have completed
        for sequence in list(state.waiting) if budget_tokens > 0 else ():
            if budget_tokens <= 0 or not state.table.num_free:
                break
            # The last known token is always computed: its logits are wanted.
            may_hit = state.config.prefix_cache and not sequence.computes_prompt
            most = (len(sequence.tokens) - 1) // pool.block_size if may_hit else 0
            match = pool.match(sequence.tokens, most, sequence.root)
            if may_hit and not cached and state.may_lengthen(match, sequence.root):
                cached = True
                state.cache_completed_blocks()
                match = pool.match(sequence.tokens, most, sequence.root)
            if match.promised:
                continue
            fresh = state.blocks_to_admit(sequence) - len(match.blocks)
            if fresh + pool.count_unreferenced(match.blocks) > pool.num_available:
                break
            slot = state.admit(sequence, match)
            chunks.append(self._chunk(slot, budget_tokens))
            budget_tokens -= chunks[-1].query_len
        return chunks
