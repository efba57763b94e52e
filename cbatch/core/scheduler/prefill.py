"""Prompts in a step: the number of prompt tokens, the chunks, and the admission of requests.

The prefilling row with the fewest remaining tokens is served first, so that a short prompt does not
wait for the end of a long one. To bound the delay, a row goes first once later prompts have
computed as many tokens before it as it had at admission. Under the `priority` policy no row
overtakes a row of higher priority. Requests are admitted in service order (see queue.py).
"""

from __future__ import annotations

import msgspec

from cbatch.core.scheduler.decode_batch import DecodeBatch, RowTokens
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.state import SchedulerState


class Chunk(msgspec.Struct, frozen=True):
    """The next `query_len` tokens of a prompt; `last` if they are its last ones."""

    slot: int
    query_len: int
    last: bool


class _Row(msgspec.Struct, frozen=True):
    """A row that prefills."""

    slot: int
    sequence: Sequence
    remaining_tokens: int

    @property
    def is_due(self) -> bool:
        """True if later prompts have overtaken the row for long enough."""
        return self.sequence.overtaken_tokens >= self.sequence.tokens_at_admission


class PrefillScheduler:
    """Schedules prompts, once per plan, after the decoding rows have their tokens and blocks."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def schedule(
        self, budget_tokens: int, batch: DecodeBatch, tokens: RowTokens, *, may_admit: bool
    ) -> list[Chunk]:
        """Return the chunks of a step in which the rows of `batch` decode `tokens`, at most
        `budget_tokens` in all; `may_admit`: requests may be admitted."""
        rows = self._rows()
        budget_tokens = min(budget_tokens, self._max_tokens(rows, batch, tokens))
        chunks: list[Chunk] = []
        if may_admit and rows and budget_tokens > 0:
            chunks += self._admit(budget_tokens, before=rows[0])
            budget_tokens -= sum(chunk.query_len for chunk in chunks)
        for row in rows:
            if budget_tokens <= 0:
                return chunks
            chunks.append(self._serve(row, budget_tokens))
            budget_tokens -= chunks[-1].query_len
        if may_admit and budget_tokens > 0:
            chunks += self._admit(budget_tokens)
        return chunks

    def _max_tokens(self, rows: list[_Row], batch: DecodeBatch, tokens: RowTokens) -> int:
        """Return the prompt tokens that do not delay decoding rows too long (see step_costs.py)."""
        state, num_rows = self.state, len(batch.slots)
        if not num_rows:
            return state.config.max_num_batched_tokens
        pairs = int(state.table.num_tokens[batch.rows] @ tokens.query_lens)
        context = state.table.kv_len(rows[0].slot) if rows else 0
        target_s = batch.itl_target_s
        return state.step_costs.chunk(num_rows + tokens.total_drafts, pairs, context, target_s)

    def _rows(self) -> list[_Row]:
        """Return the rows that prefill, in the order in which they are served in this step."""
        rows = []
        for slot in self.state.prefilling:
            sequence = self.state.owners[slot]
            assert sequence is not None
            if not sequence.pending_preemption:
                rows.append(_Row(slot, sequence, self._remaining(slot)))
        if len(rows) > 1:
            rows.sort(key=lambda row: (self._level(row.sequence), self._length_key(row)))
        return rows

    @staticmethod
    def _length_key(row: _Row) -> int:
        return 0 if row.is_due else row.remaining_tokens

    def _level(self, sequence: Sequence) -> float:
        """Return the priority level; no row overtakes one of a lower level."""
        return sequence.rank[0] if self.state.config.queue_policy == "priority" else 0.0

    def _remaining(self, slot: int) -> int:
        """Return the tokens that neither committed steps nor plans in flight compute."""
        remaining = int(self.state.table.num_uncomputed_tokens[slot])
        for step in self.state.in_flight:  # exact, since a prefilling row drafts nothing
            remaining -= int(step.plan.query_lens[step.plan.slots == slot].sum())
        return remaining

    def _serve(self, row: _Row, budget_tokens: int) -> Chunk:
        """Return the next chunk of a row, and count its tokens for the rows that it overtakes."""
        remaining = row.remaining_tokens
        chunk = Chunk(row.slot, min(remaining, budget_tokens), last=remaining <= budget_tokens)
        for slot in self.state.prefilling:  # in order of admission
            if slot == row.slot:
                break
            earlier = self.state.owners[slot]
            assert earlier is not None
            earlier.overtaken_tokens += chunk.query_len
        return chunk

    def _admit(self, budget_tokens: int, before: _Row | None = None) -> list[Chunk]:
        """Admit waiting sequences in service order, and return their chunks. With `before`, admit
        only sequences that overtake this row."""
        state, pool = self.state, self.state.pool
        chunks: list[Chunk] = []
        cached = False  # the completed blocks of running sequences are in the prefix cache
        for sequence in list(state.waiting) if budget_tokens > 0 else ():
            if budget_tokens <= 0 or not state.table.num_free:
                break
            if before is not None and not self._overtakes(sequence, before):
                break
            # The last known token is always computed, because its logits are needed.
            may_hit = state.config.enable_prefix_caching and not sequence.computes_prompt
            max_hits = (len(sequence.tokens) - 1) // pool.block_size if may_hit else 0
            match = pool.match(sequence.tokens, max_hits, sequence.root)
            if may_hit and not cached and state.may_match_more(match, sequence.root):
                cached = True
                state.cache_completed_blocks()
                match = pool.match(sequence.tokens, max_hits, sequence.root)
            if match.promised:
                continue
            fresh = state.blocks_to_admit(sequence) - len(match.blocks)
            if fresh + pool.count_unreferenced(match.blocks) > pool.num_available:
                break
            slot = state.admit(sequence, match)
            chunks.append(self._serve(_Row(slot, sequence, self._remaining(slot)), budget_tokens))
            budget_tokens -= chunks[-1].query_len
        return chunks

    def _overtakes(self, sequence: Sequence, row: _Row) -> bool:
        level, other = self._level(sequence), self._level(row.sequence)
        shorter = not row.is_due and len(sequence.tokens) < row.remaining_tokens
        return level < other or (level == other and shorter)
