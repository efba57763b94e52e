"""Packing a step: decodes and their drafts, chunks of prompts, new requests."""

from __future__ import annotations

from math import ceil

import numpy as np

from cbatch.core.scheduler.decode_batch import DecodeBatch, Flight, RowTokens
from cbatch.core.scheduler.draftable_rows import DraftableRows
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.preemption import PreemptionCandidate, decide_growth, fit_drafts
from cbatch.core.scheduler.prefill import Chunk, PrefillScheduler
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.state import SchedulerState


class Planner:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._next_step_id = 0
        self._prefill = PrefillScheduler(state)

    def plan(self) -> StepPlan | None:
        """Every decoding row has its token; drafts come next, then prompts, then new requests."""
        state = self.state
        num_preemptions = state.stats.preemptions
        batch, tokens = self._decodes()
        chunks: list[Chunk] = []
        if state.prefilling or (state.waiting and state.table.num_free):
            left = state.config.step_budget_tokens - len(batch.slots) - tokens.total_drafts
            left -= ceil(tokens.total_catch_up * state.config.catch_up_price)
            may_admit = state.stats.preemptions == num_preemptions and not state.pending_preemption
            chunks = self._prefill.schedule(left, batch, tokens, may_admit=may_admit)
        if not (len(batch.slots) or chunks):
            return None
        return self._build(batch, tokens, chunks)

    # ---- decoding rows ------------------------------------------------------------------------

    def _decodes(self) -> tuple[DecodeBatch, RowTokens]:
        """Who decodes, how many tokens each; their blocks are reserved."""
        state, table = self.state, self.state.table
        batch = state.decode_batch()
        if state.flights:
            known, reach = self._bounds()
            batch = self._still_open(batch, known)
            known, reach = known[batch.rows], reach[batch.rows]
        else:
            known = reach = table.num_tokens[batch.rows]
        if not len(batch.slots):
            return batch, batch.plain
        tokens = self._choose_drafts(batch, known)
        if tokens.total_drafts:
            reach = reach + tokens.num_drafts
        if state.flights:  # two bounds together may pass the end
            reach = np.minimum(reach, table.max_total[batch.rows])
        short = (reach > table.capacity[batch.rows]).nonzero()[0]
        if not len(short) or self._append_blocks(batch.index[short], reach[short]):
            return batch, tokens
        return self._preempt(batch, tokens)

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """By slot: the tokens it knows at least, and the positions it needs at most for one more
        token, once the plans in flight have committed."""
        table = self.state.table
        known = table.num_tokens.copy()
        reach = table.num_tokens - table.num_uncomputed_tokens + 1
        for flight in self.state.flights:
            known[flight.rows] += flight.plan.wants_logits
            reach[flight.rows] += flight.plan.query_lens
        return known, reach

    def _still_open(self, batch: DecodeBatch, known: np.ndarray) -> DecodeBatch:
        """Without rows that leave, and those whose plan in flight is sure to reach max_tokens."""
        state = self.state
        going = known[batch.rows] < state.table.max_total[batch.rows]
        for sequence in state.pending_preemption:
            going &= batch.slots != sequence.slot
        return batch if going.all() else state.batch_of(batch.index[going].tolist())

    def _choose_drafts(self, batch: DecodeBatch, known: np.ndarray) -> RowTokens:
        """Drafts and catch-up tokens per row, before blocks are considered."""
        state = self.state
        if not batch.may_draft:
            return batch.plain
        step = DraftableRows(state, batch, known)
        num_drafts = state.policy.choose(step)
        if num_drafts is None:
            return batch.plain
        lag, budget = step.lag, step.budget_tokens
        drafts = batch.draft_limits(state.table).most
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

    def _append_blocks(self, slots: np.ndarray, reach: np.ndarray) -> bool:
        """Blocks for positions up to `reach` of these slots, which lack some; False if there are
        not enough, and then nothing was done."""
        state, size = self.state, self.state.pool.block_size
        counts, total = None, len(slots)
        if state.flights or state.policy.max_depth >= size:  # else a row may lack one at most
            counts = (reach - state.table.capacity[slots] + (size - 1)) // size
            total = int(np.add.reduce(counts))
        if total > state.pool.num_available:
            return False
        state.append_blocks(slots, counts)
        return True

    def _preempt(self, batch: DecodeBatch, tokens: RowTokens) -> tuple[DecodeBatch, RowTokens]:
        """Blocks do not suffice for everybody: decide who runs, then preempt and append."""
        state, table, pool = self.state, self.state.table, self.state.pool
        wanted = dict(zip(batch.slots.tolist(), tokens.num_drafts.tolist(), strict=True))
        running = [owner for owner in state.owners if owner is not None]
        reach = self._bounds()[1]
        rows = [
            self._row(owner, wanted, reach) for owner in running if not owner.pending_preemption
        ]
        held_back = [slot for flight in state.flights for slot in flight.held_slots]
        leaving = held_back + [s.slot for s in state.pending_preemption if s.slot is not None]
        coming = sum(pool.count_sole(state.block_row(slot)) for slot in leaving)
        growth = decide_growth(rows, pool.num_available, coming, pool.block_size)
        for victim in growth.victims:
            sequence = state.owners[victim]
            assert sequence is not None
            if self._in_flight(victim):
                sequence.pending_preemption = True
                state.pending_preemption.append(sequence)
            else:
                state.preempt(sequence)
        keep = np.array([slot in growth.granted_drafts for slot in wanted], dtype=bool)
        batch = state.batch_of(batch.index[keep].tolist())
        granted = [growth.granted_drafts[slot] for slot in batch.slots.tolist()]
        catch_up = tokens.catch_up[keep]
        drafts = np.array(granted, dtype=np.int32)
        tokens = RowTokens.of(drafts, catch_up, int(np.add.reduce(catch_up)))
        need = np.minimum(reach[batch.index] + drafts, table.max_total[batch.index])
        short = (need > table.capacity[batch.index]).nonzero()[0]
        if len(short):
            self._append_blocks(batch.index[short], need[short])
        return batch, tokens

    def _row(
        self, sequence: Sequence, wanted: dict[int, int], reach: np.ndarray
    ) -> PreemptionCandidate:
        table, slot = self.state.table, sequence.slot
        assert slot is not None
        gained = int(table.num_tokens[slot]) - sequence.tokens_at_admission
        blocks = self.state.block_row(slot)
        return PreemptionCandidate(
            slot=slot,
            rank=sequence.rank,
            decodes=slot in wanted,
            kv_tokens=int(reach[slot]) - 1,
            num_drafts=wanted.get(slot, 0),
            max_tokens=int(table.max_total[slot]),
            blocks_held=len(blocks),
            blocks_freed=self.state.pool.count_sole(blocks),
            in_flight=self._in_flight(slot),
            protected=sequence.preemptions > 0 and gained < self.state.pool.block_size,
        )

    def _in_flight(self, slot: int) -> bool:
        return any((flight.plan.slots == slot).any() for flight in self.state.flights)

    # ---- the plan -----------------------------------------------------------------------------

    def _build(self, batch: DecodeBatch, tokens: RowTokens, chunks: list[Chunk]) -> StepPlan:
        state, table = self.state, self.state.table
        slots, generations, wants = batch.slots, batch.generations, batch.wants_logits
        rows, owners = batch.rows, batch.owners
        if chunks:
            more = [(c.slot, table.generation.item(c.slot), c.query_len, 0, 0) for c in chunks]
            # Column by column it would cost three times as much.
            columns = np.empty((5, len(slots) + len(chunks)), dtype=np.int32)
            decodes = slots, generations, tokens.query_lens, tokens.num_drafts, tokens.catch_up
            columns[:, : len(slots)] = decodes
            columns.T[len(slots) :] = more
            slots, generations, query_lens, num_drafts, catch_up = columns
            total, behind = tokens.total_drafts, tokens.total_catch_up
            tokens = RowTokens(
                num_drafts, query_lens, catch_up, total, behind, num_chunks=len(chunks)
            )
            rows = slots.astype(np.intp)
            owners = owners + state.owners_of([chunk.slot for chunk in chunks])
            wants = table.trues[: len(slots)].copy()
            wants[-len(chunks) :] = [chunk.last for chunk in chunks]
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
            wants_logits=wants,
            deltas=state.take_deltas(),
        )
        self._next_step_id += 1
        flight = Flight(plan, rows, owners, tokens, bool(state.flights), batch.itl_target_s)
        state.flights.append(flight)
        return plan
