"""The scheduler's state. No other file changes the slots and blocks of sequences."""

from __future__ import annotations

from typing import cast

import numpy as np

from cbatch.core.prices.chunk_sizes import ChunkSizes
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.request.request import FinishReason, Request
from cbatch.core.scheduler.block_pool import BlockPool, Match, Node, root_of
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import Deltas, NewSequence, PendingDeltas
from cbatch.core.scheduler.queue import WaitingQueue, rank_request
from cbatch.core.scheduler.recorded_pool import RecordedBlockPool
from cbatch.core.scheduler.sequence import Finished, SchedulerStats, Sequence
from cbatch.core.scheduler.slot_pages import SlotPages
from cbatch.core.scheduler.slot_table import DecodeBatch, InFlightStep, SlotTable, runs
from cbatch.core.speculation.build import build_policy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits

_NONE = np.zeros(0, dtype=np.int32)


class SchedulerState:
    """Queue, slots, blocks and plans in flight. `schedule` and `update_from_output` decide; the
    methods apply."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        pool = RecordedBlockPool if config.kv_events else BlockPool
        self.pool = pool(config.num_blocks, config.block_size)
        max_blocks = self.pool.num_blocks_for(config.max_sequence_tokens)
        self._block_size = np.array(config.block_size, dtype=np.int32)
        self.deltas = PendingDeltas()  # of the next plan
        self.table = SlotTable(config.max_num_seqs, max_blocks)
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.sequences: dict[str, Sequence] = {}  # every accepted request that has not ended
        self.owners: list[Sequence | None] = [None] * config.max_num_seqs
        self.prefilling: list[int] = []  # slots, in order of admission
        self.decoding: list[int] = []  # slots, ascending
        self.cached_batch: DecodeBatch | None = None  # of `decoding`; None: `decoding` has changed
        self.in_flight: list[InFlightStep] = []  # at most two, oldest first
        self.num_plans = 0  # number of plans so far; the next plan's `step_id`
        self.pending_preemption: list[Sequence] = []
        self.last_commit_s: float | None = None  # None: the engine was idle since
        self.finished: list[Finished] = []
        self.stats = SchedulerStats()
        self.costs = StepCosts(config.cost_profile)
        self.policy = build_policy(
            config.lookahead if config.default_chain else LookaheadConfig(),
            PolicyLimits(config.max_num_seqs, config.max_num_batched_tokens, self.costs),
        )
        self.chunk_sizes = ChunkSizes(
            self.costs, config.max_num_batched_tokens, config.prompt_share
        )
        self.pages: SlotPages | None = None  # for models with recurrent layers
        if config.num_state_pages:
            parts = self.table, self.pool, self.deltas, self.cache_blocks
            self.pages = SlotPages(config, self.policy.max_depth, *parts)
        has_draft = self.policy.max_depth > 0 and config.draft_context_tokens is not None
        self.has_draft_kv = has_draft and config.draft_lags  # whether its length is counted
        # With a reserve of a block or more, a sequence gains a block between two preemptions.
        self.reserve_tokens = max(config.decode_reserve_tokens, config.block_size)
        self.stop_union = _NONE  # stop ids of all running sequences
        self._stop_counts: dict[int, int] = {}  # number of running sequences by stop id
        self._arrivals = 0  # number of requests so far

    # ---- requests -----------------------------------------------------------------------------

    def enqueue(self, request: Request, tokens: np.ndarray, now_s: float) -> None:
        """Add a request to the queue; `tokens`, int32, are its prompt and its output so far."""
        config, params = self.config, request.params
        rank = rank_request(
            config.queue_policy, config.ageing_per_s, request, self._arrivals, now_s
        )
        self._arrivals += 1
        prompt_tokens = len(request.prompt)
        eos_ids = () if params.ignore_eos else config.eos_ids
        sequence = Sequence(
            request=request,
            rank=rank,
            level=rank[0] if config.queue_policy == "priority" else 0.0,
            root=root_of(request.cache_salt),
            stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
            min_total_tokens=prompt_tokens + params.min_tokens,
            max_total_tokens=min(prompt_tokens + params.max_tokens, config.max_sequence_tokens),
            tokens=tokens,
        )
        self.sequences[request.request_id] = sequence
        self.waiting.push(sequence, rank, preempted=len(tokens) > prompt_tokens)

    def blocks_to_admit(self, sequence: Sequence) -> int:
        """Return the blocks for all known tokens and the decode reserve."""
        tokens = min(len(sequence.tokens) + self.reserve_tokens, sequence.max_total_tokens)
        return self.pool.num_blocks_for(tokens)

    @property
    def has_free_slot(self) -> bool:
        """Return whether another sequence has a slot, and the state pages that it may need."""
        pages, overlaps = self.pages, bool(self.in_flight)
        return self.table.num_free > 0 and (pages is None or pages.room(1, overlaps=overlaps) >= 0)

    def admit(self, sequence: Sequence, match: Match) -> None:
        """Move a waiting sequence, whose cached prefix is `match`, into a slot."""
        table, pool = self.table, self.pool
        self.waiting.remove(sequence.rank)
        slot = table.take_slot()
        hits, state_page = len(match.blocks), None
        pool.acquire(match.blocks)
        total_blocks = self.blocks_to_admit(sequence)
        blocks = np.empty(total_blocks, dtype=np.intp)
        blocks[:hits] = match.blocks
        blocks[hits:] = pool.allocate(total_blocks - hits)
        tokens = sequence.tokens
        kv_len = hits * pool.block_size
        draft_valid = pool.draft_valid[blocks[:hits]].tolist()
        draft_hits = draft_valid.index(False) if False in draft_valid else hits
        table.ensure_width(sequence.max_total_tokens)
        table.tokens[slot, : len(tokens)] = tokens
        table.blocks[slot, :total_blocks] = blocks
        max_depth, cap = self.policy.max_depth, sequence.request.params.max_lookahead
        lookahead_end, catch_up_end = sequence.draft_limits(self.config)
        for column, value in (
            (table.num_tokens, len(tokens)),
            (table.num_uncomputed_tokens, len(tokens) - kv_len),
            (table.draft_kv, draft_hits * pool.block_size),
            (table.num_cached_tokens, kv_len),
            (table.max_total, sequence.max_total_tokens),
            (table.max_lookahead, max_depth if cap is None else min(cap, max_depth)),
            (table.lookahead_end, lookahead_end),
            (table.catch_up_end, catch_up_end),
            (table.capacity, total_blocks * pool.block_size),
            (table.reserved_tokens, total_blocks * pool.block_size),
        ):
            column[slot] = value
        self.policy.enter(slot, sequence.policy_state)
        sequence.slot = slot
        sequence.tokens_at_admission = len(tokens)
        sequence.last_node, sequence.num_nodes = match.node, hits
        if self.config.enable_prefix_caching:
            self._add_nodes(sequence, tokens, blocks[hits : len(tokens) // pool.block_size])
        if self.pages is not None:
            state_page = self.pages.admit(slot, sequence, match, blocks)
        self.owners[slot] = sequence
        self.prefilling.append(slot)
        self._count_stops(sequence, 1)
        self.deltas.new_sequences.append(self._new_sequence(sequence, slot, blocks, state_page))
        self.stats.prompt_tokens += len(tokens)
        self.stats.prefix_hit_tokens += kv_len

    def _new_sequence(
        self, sequence: Sequence, slot: int, blocks: np.ndarray, state_page: int | None
    ) -> NewSequence:
        table, request = self.table, sequence.request
        return NewSequence(
            slot=slot,
            generation=int(table.generation[slot]),
            request_id=request.request_id,
            seed=request.seed,
            choice=request.choice,
            params=request.params,
            stop_ids=sequence.stop_ids,
            tokens=sequence.tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            max_total_tokens=sequence.max_total_tokens,
            kv_len_tokens=table.kv_len(slot),
            draft_kv_len_tokens=int(table.draft_kv[slot]),
            blocks=blocks.astype(np.int32),
            state_page=state_page,
        )

    def start_decoding(self, slot: int) -> None:
        """Turn a prefilling slot, whose last chunk is planned, into a decoding slot."""
        self.prefilling.remove(slot)
        self.decoding.append(slot)
        self.decoding.sort()
        self.cached_batch = None

    def decode_batch(self) -> DecodeBatch:
        """Return the batch of all decoding rows: the same object until their set changes."""
        if self.cached_batch is None:
            self.cached_batch = self.batch_of(self.decoding)
        return self.cached_batch

    @property
    def num_prompts(self) -> int:
        """Prompts that are computed, or have a free slot."""
        return len(self.prefilling) + min(len(self.waiting), self.table.num_free)

    def batch_of(self, slots: list[int]) -> DecodeBatch:
        owners, floor_s = self.owners_of(slots), self.config.min_itl_target_s
        own_s = {owner.request.itl_target_s for owner in owners}
        targets_s = [self.config.itl_target_s if s is None else max(s, floor_s) for s in own_s]
        shortest_s = min((s for s in targets_s if s is not None), default=None)
        return DecodeBatch(self.table, owners, slots, shortest_s)

    def owners_of(self, slots: list[int]) -> list[Sequence]:
        return cast("list[Sequence]", [self.owners[slot] for slot in slots])

    def preempt(self, sequence: Sequence) -> None:
        """Move a sequence to the head of the queue, without its blocks."""
        assert sequence.slot is not None
        sequence.tokens = self.table.token_row(sequence.slot).copy()
        sequence.preemptions += 1
        sequence.pending_preemption = False
        self.leave_slot(sequence)
        self.waiting.push(sequence, sequence.rank, preempted=True)
        self.stats.preemptions += 1

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        keep_tokens: int | None = None,
        message: str | None = None,
    ) -> None:
        """End an accepted request, and cut its output to `keep_tokens` tokens, if given."""
        if sequence.slot is None:
            self.waiting.remove(sequence.rank)
            output = sequence.tokens[sequence.num_prompt_tokens :][:keep_tokens]
        else:
            tokens = self.table.token_row(sequence.slot)
            output = tokens[sequence.num_prompt_tokens :][:keep_tokens].copy()
            self.leave_slot(sequence)
        del self.sequences[sequence.request.request_id]
        self.finished.append(Finished(sequence.request.request_id, reason, message, output))

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the endings since the last call."""
        finished, self.finished = tuple(self.finished), []
        return finished

    # ---- slots and blocks ---------------------------------------------------------------------

    def leave_slot(self, sequence: Sequence) -> None:
        """Cancel a sequence's rows in flight; free slot and blocks when the last one commits."""
        slot = sequence.slot
        assert slot is not None
        if self.pages is not None:
            self.pages.advance(slot, sequence, leaves=True)
        self.cache_blocks(slot)
        sequence.policy_state = self.policy.leave(slot)
        self.table.generation[slot] += 1
        self.owners[slot] = None
        sequence.slot = None
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        else:
            self.decoding.remove(slot)
            self.cached_batch = None
        self._count_stops(sequence, -1)
        steps = [step for step in self.in_flight if slot in step.plan.slots.tolist()]
        for step in steps:
            step.cancelled_slots.append(slot)
        if steps:
            steps[-1].slots_to_free.append(slot)
        else:
            self.free_slot(slot)

    def free_slot(self, slot: int) -> None:
        self.pool.release(self.block_row(slot))
        if self.pages is not None:
            self.pages.free(slot)
        self.table.capacity[slot] = 0
        self.table.free_slot(slot)
        self.deltas.released.append(slot)

    def block_row(self, slot: int) -> np.ndarray:
        """Return the blocks of a sequence in order of position, as a view."""
        return self.table.blocks[slot, : self.table.capacity[slot] // self.pool.block_size]

    def append_blocks(self, slots: np.ndarray, counts: np.ndarray | None) -> None:
        """Give `counts[i]` more blocks (> 0; None: one) to `slots[i]`, and report them in the next
        plan. Call it at most once a plan. The caller has checked that the pool has the blocks."""
        table, size = self.table, self._block_size
        capacity = table.capacity[slots]
        rows, indices = slots, capacity // size
        if counts is not None:
            rows, indices = runs(slots, indices, counts)
            size = counts * size
        blocks = self.pool.allocate(len(rows))
        table.blocks[rows, indices] = blocks
        table.capacity[slots] = capacity + size
        self.deltas.append(rows, indices, blocks)

    def return_tails(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Free the last `counts[i]` (> 0) blocks of `slots[i]`, which are reserved and unused."""
        table, size = self.table, self.pool.block_size
        kept = table.capacity[slots] - counts * size
        rows, indices = runs(slots, kept // size, counts)
        self.pool.release_private(table.blocks[rows, indices])
        table.capacity[slots] = kept

    def return_appended(self, deltas: Deltas) -> None:
        """Free the blocks that a plan appended and no row used. Call it only if no other plan was
        in flight: then no row has gained another block since."""
        table, size, unused = self.table, self.pool.block_size, []
        num_tokens, capacity = table.num_tokens.item, table.capacity.item
        appended = deltas.append_slots.tolist(), deltas.append_indices.tolist()
        for i, (slot, index) in enumerate(zip(*appended, strict=True)):
            # KV has all known tokens but the last. A row that has left its slot has no capacity.
            if num_tokens(slot) - 1 <= index * size < capacity(slot):
                unused.append(i)
        for i in reversed(unused):  # a row's first unused block sets its capacity last
            table.capacity[appended[0][i]] = appended[1][i] * size
        if unused:
            self.pool.release_private(deltas.append_blocks[unused])

    def may_match_more(self, match: Match, root: Node) -> bool:
        """Return whether `cache_completed_blocks` could improve a match: by a promised block, by
        newly valid draft KV, or by blocks of a running sequence after a matched node."""
        if match.promised or (match.blocks and self.has_draft_kv):
            return True
        path = self.pool.node_uids(match.blocks, root)
        running = (self.owners[slot] for slot in (*self.decoding, *self.prefilling))
        return any(owner is not None and owner.last_node.uid in path for owner in running)

    def cache_completed_blocks(self) -> None:
        """Cache the blocks that running sequences have completed since the last call."""
        table = self.table
        running = np.array(self.decoding + self.prefilling, dtype=np.intp)
        kv_len = table.num_tokens[running] - table.num_uncomputed_tokens[running]
        complete = kv_len - table.num_cached_tokens[running] >= self.pool.block_size
        for slot in running[complete].tolist():
            self.cache_blocks(slot)

    def cache_blocks(self, slot: int) -> None:
        """Put the sequence's complete blocks into the prefix cache. To save time this is not done
        in every step, but before lookups that might hit them, and when the sequence leaves."""
        table, pool, sequence = self.table, self.pool, self.owners[slot]
        assert sequence is not None
        if not self.config.enable_prefix_caching:
            return
        size = pool.block_size
        first, last = int(table.num_cached_tokens[slot]) // size, table.kv_len(slot) // size
        if last > max(first, sequence.num_nodes):
            blocks = table.blocks[slot, sequence.num_nodes : last]
            self._add_nodes(sequence, table.tokens[slot], blocks)
        pool.mark_ready(table.blocks[slot, first:last])
        table.num_cached_tokens[slot] = max(first, last) * size
        if self.has_draft_kv:
            draft_blocks = int(table.draft_kv[slot]) // size
            assert draft_blocks >= 0, "the draft's KV lags by more tokens than there are"
            pool.draft_valid[table.blocks[slot, :draft_blocks]] = True

    def taint(self, slot: int, root: Node) -> None:
        """Remove what the slot's sequence wrote from the cache: its values may not be finite."""
        if self.pages is not None:
            self.pages.taint(slot, root)
        self.pool.taint(self.block_row(slot))

    def reset_executor(self) -> None:
        """Drop plans in flight and the prefix cache, and preempt every running sequence, because
        the executor lost its state."""
        self.last_commit_s = None
        self.pending_preemption.clear()
        for step in self.in_flight:
            for slot in step.slots_to_free:
                self.free_slot(slot)
        self.in_flight.clear()
        for sequence in [owner for owner in self.owners if owner is not None]:
            self.preempt(sequence)
        self.pool.clear_cache()
        self.deltas.clear()

    # ---- inside -------------------------------------------------------------------------------

    def _add_nodes(self, sequence: Sequence, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """Add nodes for the sequence's next blocks, promised at admission or complete."""
        end, first = sequence.last_node, sequence.num_nodes
        sequence.last_node = self.pool.add_nodes(blocks, end, tokens, first)
        sequence.num_nodes += len(blocks)

    def _count_stops(self, sequence: Sequence, change: int) -> None:
        counts = self._stop_counts
        num_ids = len(counts)
        for token_id in sequence.stop_ids:
            counts[token_id] = counts.get(token_id, 0) + change
            if counts[token_id] == 0:
                del counts[token_id]
        if len(counts) != num_ids:
            self.stop_union = np.asarray(sorted(counts), dtype=np.int32)
