"""The plan of a step: decoding rows and their drafts, chunks of prompts, new requests."""

from __future__ import annotations

from math import ceil

import numpy as np

from cbatch.core.scheduler.decode_batch import DecodeBatch, InFlightStep, RowTokens
from cbatch.core.scheduler.draftable_rows import DraftableRows
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.preemption import PreemptionCandidate, decide_growth, fit_drafts
from cbatch.core.scheduler.prefill import Chunk, PrefillScheduler
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.state import SchedulerState


class Planner:
    """Makes the plans of steps (vLLM's `schedule`)."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._next_step_id = 0
        self._prefill = PrefillScheduler(state)

    def plan(self) -> StepPlan | None:
        """Return the next plan, or None if no row can run. The token budget goes first to the next
        token of every decoding row, then to drafts, then to prompts and new requests."""
        state = self.state
        num_preemptions = state.stats.preemptions
        batch, tokens = self._plan_decodes()
        chunks: list[Chunk] = []
        if state.prefilling or (state.waiting and state.table.num_free):
            budget = state.config.max_num_batched_tokens - len(batch.slots) - tokens.total_drafts
            budget -= ceil(tokens.total_catch_up * state.config.catch_up_price)
            may_admit = state.stats.preemptions == num_preemptions and not state.pending_preemption
            chunks = self._prefill.schedule(budget, batch, tokens, may_admit=may_admit)
        if not (len(batch.slots) or chunks):
            return None
        return self._build(batch, tokens, chunks)

    # ---- decoding rows ------------------------------------------------------------------------

    def _plan_decodes(self) -> tuple[DecodeBatch, RowTokens]:
        """Return the decoding rows and their tokens, with blocks reserved for them."""
        state, table = self.state, self.state.table
        batch = state.decode_batch()
        if state.in_flight:
            num_known, max_kv_len = self._token_bounds()
            batch = self._without_finishing(batch, num_known)
            num_known, max_kv_len = num_known[batch.rows], max_kv_len[batch.rows]
        else:
            num_known = max_kv_len = table.num_tokens[batch.rows]
        if not len(batch.slots):
            return batch, batch.plain
        tokens = self._choose_drafts(batch, num_known)
        if tokens.total_drafts:
            max_kv_len = max_kv_len + tokens.num_drafts
        if state.in_flight:  # the sum of two upper bounds may exceed the end
            max_kv_len = np.minimum(max_kv_len, table.max_total[batch.rows])
        full = (max_kv_len > table.capacity[batch.rows]).nonzero()[0]
        if not len(full) or self._append_blocks(batch.index[full], max_kv_len[full]):
            return batch, tokens
        return self._preempt(batch, tokens)

    def _token_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two bounds for the time when the plans in flight are committed, int32 [slots]: the
        fewest known tokens, and the most KV positions after one more token."""
        table = self.state.table
        num_known = table.num_tokens.copy()
        max_kv_len = table.num_tokens - table.num_uncomputed_tokens + 1
        for step in self.state.in_flight:
            num_known[step.rows] += step.plan.wants_logits
            max_kv_len[step.rows] += step.plan.query_lens
        return num_known, max_kv_len

    def _without_finishing(self, batch: DecodeBatch, num_known: np.ndarray) -> DecodeBatch:
        """Return the batch without rows that will be preempted, and rows that reach `max_tokens` in
        a plan in flight."""
        state = self.state
        continues = num_known[batch.rows] < state.table.max_total[batch.rows]
        for sequence in state.pending_preemption:
            continues &= batch.slots != sequence.slot
        return batch if continues.all() else state.batch_of(batch.index[continues].tolist())

    def _choose_drafts(self, batch: DecodeBatch, num_known: np.ndarray) -> RowTokens:
        """Return drafts and catch-up tokens per row within the token budget. Whether there are
        blocks for them is decided later."""
        state = self.state
        if not batch.may_draft:
            return batch.plain
        step = DraftableRows(state, batch, num_known)
        num_drafts = state.policy.choose(step)
        if num_drafts is None:
            return batch.plain
        lag, budget = step.draft_kv_lag, step.budget_tokens
        drafts = batch.draft_limits(state.table).max_tokens
        if num_drafts is not drafts.num_drafts:
            drafts = RowTokens.of(num_drafts, lag, 0)
        total = int(np.add.reduce(lag))
        if drafts.all_draft and drafts.total_drafts + total <= budget:
            return drafts.with_catch_up(lag.copy(), total)
        first = self._next_step_id % step.num_rows
        fitting, catch_up, total = fit_drafts(num_drafts, lag, budget, first)
        if fitting is not num_drafts:
            drafts = RowTokens.of(fitting, lag, 0)
        return drafts.with_catch_up(catch_up, total - drafts.total_drafts)

    # ---- blocks -------------------------------------------------------------------------------

    def _append_blocks(self, slots: np.ndarray, max_kv_len: np.ndarray) -> bool:
        """Append blocks to slots until they have `max_kv_len` positions; each lacks some. If the
        pool has too few blocks, do nothing and return False."""
        state, size = self.state, self.state.pool.block_size
        counts, total = None, len(slots)
        if state.in_flight or state.policy.max_depth >= size:  # else each lacks one block
            counts = (max_kv_len - state.table.capacity[slots] + (size - 1)) // size
            total = int(np.add.reduce(counts))
        if total > state.pool.num_available:
            return False
        state.append_blocks(slots, counts)
        return True

    def _preempt(self, batch: DecodeBatch, tokens: RowTokens) -> tuple[DecodeBatch, RowTokens]:
        """Preempt sequences because the pool has too few blocks, append blocks to the other rows,
        and return these rows with their tokens."""
        state, table, pool = self.state, self.state.table, self.state.pool
        drafts_by_slot = dict(zip(batch.slots.tolist(), tokens.num_drafts.tolist(), strict=True))
        running = [owner for owner in state.owners if owner is not None]
        max_kv_len = self._token_bounds()[1]
        rows = [
            self._candidate(owner, drafts_by_slot, max_kv_len)
            for owner in running
            if not owner.pending_preemption
        ]
        leaving = [slot for step in state.in_flight for slot in step.slots_to_free]
        leaving += [s.slot for s in state.pending_preemption if s.slot is not None]
        pending = sum(pool.count_unshared(state.block_row(slot)) for slot in leaving)
        growth = decide_growth(rows, pool.num_available, pending, pool.block_size)
        for victim in growth.victims:
            sequence = state.owners[victim]
            assert sequence is not None
            if self._is_in_flight(victim):
                sequence.pending_preemption = True
                state.pending_preemption.append(sequence)
            else:
                state.preempt(sequence)
        keep = np.array([slot in growth.granted_drafts for slot in drafts_by_slot], dtype=bool)
        batch = state.batch_of(batch.index[keep].tolist())
        granted = [growth.granted_drafts[slot] for slot in batch.slots.tolist()]
        catch_up = tokens.catch_up[keep]
        drafts = np.array(granted, dtype=np.int32)
        tokens = RowTokens.of(drafts, catch_up, int(np.add.reduce(catch_up)))
        kv_lens = np.minimum(max_kv_len[batch.index] + drafts, table.max_total[batch.index])
        full = (kv_lens > table.capacity[batch.index]).nonzero()[0]
        if len(full):
            self._append_blocks(batch.index[full], kv_lens[full])
        return batch, tokens

    def _candidate(
        self, sequence: Sequence, drafts_by_slot: dict[int, int], max_kv_len: np.ndarray
    ) -> PreemptionCandidate:
        table, slot = self.state.table, sequence.slot
        assert slot is not None
        gained = int(table.num_tokens[slot]) - sequence.tokens_at_admission
        blocks = self.state.block_row(slot)
        return PreemptionCandidate(
            slot=slot,
            rank=sequence.rank,
            decodes=slot in drafts_by_slot,
            kv_tokens=int(max_kv_len[slot]) - 1,
            num_drafts=drafts_by_slot.get(slot, 0),
            max_tokens=int(table.max_total[slot]),
            blocks_held=len(blocks),
            blocks_freed=self.state.pool.count_unshared(blocks),
            in_flight=self._is_in_flight(slot),
            protected=sequence.preemptions > 0 and gained < self.state.pool.block_size,
        )

    def _is_in_flight(self, slot: int) -> bool:
        return any((step.plan.slots == slot).any() for step in self.state.in_flight)

    # ---- the plan -----------------------------------------------------------------------------

    def _build(self, batch: DecodeBatch, tokens: RowTokens, chunks: list[Chunk]) -> StepPlan:
        """Return the plan of decoding rows and chunks, and note it as in flight."""
        state, table = self.state, self.state.table
        slots, generations, wants_logits = batch.slots, batch.generations, batch.wants_logits
        rows, owners = batch.rows, batch.owners
        if chunks:
            prefills = [(c.slot, table.generation.item(c.slot), c.query_len, 0, 0) for c in chunks]
            # One array for all columns: separate ones would take three times as long.
            columns = np.empty((5, len(slots) + len(chunks)), dtype=np.int32)
            decodes = slots, generations, tokens.query_lens, tokens.num_drafts, tokens.catch_up
            columns[:, : len(slots)] = decodes
            columns.T[len(slots) :] = prefills
            slots, generations, query_lens, num_drafts, catch_up = columns
            totals = tokens.total_drafts, tokens.total_catch_up
            tokens = RowTokens(num_drafts, query_lens, catch_up, *totals, num_chunks=len(chunks))
            rows = slots.astype(np.intp)
            owners = owners + state.owners_of([chunk.slot for chunk in chunks])
            wants_logits = table.trues[: len(slots)].copy()
            wants_logits[-len(chunks) :] = [chunk.last for chunk in chunks]
            for chunk in chunks:
                if chunk.last:
                    state.start_decoding(chunk.slot)
        plan = StepPlan(
            step_id=self._next_step_id,
            slots=slots,
            generations=generations,
            query_lens=tokens.query_lens,
            num_drafts=tokens.num_drafts,
            catch_up=tokens.catch_up,
            wants_logits=wants_logits,
            deltas=state.take_deltas(),
        )
        self._next_step_id += 1
        step = InFlightStep(plan, rows, owners, tokens, bool(state.in_flight), batch.itl_target_s)
        state.in_flight.append(step)
        return plan
