"""The scheduler's state, and the only place that changes who holds which slot and which blocks."""

from __future__ import annotations

import numpy as np

from cbatch.core.config import SchedulerConfig
from cbatch.core.controller import LookaheadController
from cbatch.core.plan import Admission, Deltas
from cbatch.core.pool import BlockPool, Match
from cbatch.core.request import MODEL, FinishReason, Request
from cbatch.core.sequence import Finished, Flight, Reservation, SchedulerStats, Sequence
from cbatch.core.slots import SlotTable
from cbatch.core.waiting import WaitingQueue, rank_request

_NONE = np.zeros(0, dtype=np.int32)
_NOTHING_APPENDED = np.zeros((3, 0), dtype=np.int32)
NO_DELTAS = Deltas(False, _NONE, _NONE, (), _NONE, _NONE, _NONE)


class SchedulerState:
    """Queue, slots, blocks and plans in flight. Methods apply decisions; they decide nothing."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size_tokens)
        max_blocks = self.pool.num_blocks_for(config.max_sequence_tokens)
        self.table = SlotTable(config.max_slots, max_blocks)
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.sequences: dict[str, Sequence] = {}  # every accepted request that has not ended
        self.owners: list[Sequence | None] = [None] * config.max_slots
        self.prefilling: list[int] = []  # slots, in order of admission
        self.decoding: list[int] = []  # slots, ascending; the others that run
        self.rows_version = 0  # changes whenever `decoding` does
        self.flights: list[Flight] = []  # at most two, oldest first
        self.doomed: list[Sequence] = []
        self.last_commit_s: float | None = None  # None: there was nothing to do since
        self.finished: list[Finished] = []
        self.stats = SchedulerStats()
        self.speculates = bool(config.default_chain) and config.lookahead.policy != "off"
        # Whether there is a draft's KV to keep count of.
        self.has_draft_kv = self.speculates and config.draft_context_tokens is not None
        self.learns = self.speculates and config.lookahead.policy == "ema"
        self.controller: LookaheadController | None = None
        if self.speculates and config.lookahead.policy == "goodput":
            self.controller = LookaheadController(
                config.lookahead,
                max_slots=config.max_slots,
                max_tokens=config.step_budget_tokens,
                profile=config.cost_profile,
            )
            self.table.estimate = self.controller.estimate
        self.most_emitted = 1 + (config.lookahead.k if self.speculates else 0)  # by a row, a step
        # A reserve of at least a block makes every sequence gain one between two preemptions.
        self.reserve_tokens = max(config.decode_reserve_tokens, config.block_size_tokens)
        self.stop_union = _NONE  # stop ids of all running sequences
        self._stop_counts: dict[int, int] = {}
        self._arrivals = 0
        self._reset = True  # the executor has been told nothing yet
        self._released: list[int] = []
        self._admitted: list[Admission] = []
        self._appended = _NOTHING_APPENDED  # slots, indices, blocks; once a plan at most

    # ---- a request's way ----------------------------------------------------------------------

    def enqueue(self, request: Request, tokens: np.ndarray, now_s: float) -> None:
        """`tokens`, int32: those of the prompt, and of an output if it has one already."""
        config, params = self.config, request.params
        rank = rank_request(
            config.queue_policy, config.ageing_per_s, request, self._arrivals, now_s
        )
        self._arrivals += 1
        prompt_tokens = len(request.prompt)
        eos_ids = () if params.ignore_eos else config.eos_ids
        prior = config.lookahead
        sequence = Sequence(
            request=request,
            rank=rank,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
            min_total_tokens=prompt_tokens + params.min_tokens,
            max_total_tokens=min(prompt_tokens + params.max_tokens, config.max_sequence_tokens),
            tokens=tokens,
            estimate=(prior.prior_acceptance * prior.prior_trials, prior.prior_trials),
        )
        self.sequences[request.request_id] = sequence
        self.waiting.push(sequence, rank, preempted=len(tokens) > prompt_tokens)

    def blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks it holds once admitted: all known tokens and the decode reserve."""
        tokens = min(len(sequence.tokens) + self.reserve_tokens, sequence.max_total_tokens)
        return self.pool.num_blocks_for(tokens)

    def admit(self, sequence: Sequence, match: Match) -> int:
        """Move a waiting sequence into a slot, on top of its prefix hit; returns the slot."""
        table, pool, request = self.table, self.pool, sequence.request
        self.waiting.remove(sequence.rank)
        slot = table.take_slot()
        hits = len(match.blocks)
        pool.acquire(match.blocks)
        total_blocks = self.blocks_to_admit(sequence)
        blocks = np.empty(total_blocks, dtype=np.intp)
        blocks[:hits] = match.blocks
        blocks[hits:] = pool.allocate(total_blocks - hits)
        tokens = sequence.tokens
        kv_len = hits * pool.block_size
        drafted = pool.draft_valid[blocks[:hits]].tolist()
        draft_blocks = drafted.index(False) if False in drafted else hits
        table.ensure_width(sequence.max_total_tokens)
        table.tokens[slot, : len(tokens)] = tokens
        table.blocks[slot, :total_blocks] = blocks
        for column, value in (
            (table.num_tokens, len(tokens)),
            (table.todo, len(tokens) - kv_len),
            (table.draft_lag, (hits - draft_blocks) * pool.block_size),
            (table.published, kv_len),
            (table.max_total, sequence.max_total_tokens),
            (table.max_lookahead, self._lookahead_cap(request)),
            (table.lookahead_end, self._lookahead_end(sequence)),
            (table.catch_up_end, self._catch_up_end(request)),
            (table.capacity, total_blocks * pool.block_size),
            (table.floor, total_blocks * pool.block_size),
        ):
            column[slot] = value
        if self.controller is None:
            table.estimate[:, slot] = sequence.estimate
        else:
            self.controller.enter(slot, sequence.estimate if sequence.preemptions else None)
        sequence.slot = slot
        sequence.tokens_at_admission = len(tokens)
        sequence.chain_end, sequence.chain_blocks = match.node, hits
        if self.config.prefix_cache:
            self._name_blocks(sequence, tokens, blocks[hits : len(tokens) // pool.block_size])
        self.owners[slot] = sequence
        self.prefilling.append(slot)
        self._count_stops(sequence, 1)
        self._admitted.append(self._admission(sequence, slot, blocks))
        self.stats.prompt_tokens += len(tokens)
        self.stats.prefix_hit_tokens += kv_len
        return slot

    def _admission(self, sequence: Sequence, slot: int, blocks: np.ndarray) -> Admission:
        """What the executor is told of a sequence that has just entered `slot`."""
        table, request = self.table, sequence.request
        return Admission(
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
            draft_kv_len_tokens=table.draft_kv_len(slot),
            blocks=blocks.astype(np.int32),
        )

    def start_decoding(self, slot: int) -> None:
        """Its last chunk is planned; from the next step on it has one token to compute."""
        self.prefilling.remove(slot)
        self.decoding.append(slot)
        self.decoding.sort()
        self.rows_version += 1

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, tokens and estimator kept, blocks released."""
        slot = sequence.slot
        assert slot is not None
        table = self.table
        sequence.tokens = table.token_row(slot).copy()
        sequence.estimate = (float(table.estimate[0, slot]), float(table.estimate[1, slot]))
        sequence.preemptions += 1
        sequence.doomed = False
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
        """The one end of an accepted request; `keep_tokens` cuts its output."""
        if sequence.slot is None:
            self.waiting.remove(sequence.rank)
            output = sequence.tokens[sequence.num_prompt_tokens :][:keep_tokens]
        else:
            known = self.table.token_row(sequence.slot)
            output = known[sequence.num_prompt_tokens :][:keep_tokens].copy()
            self.leave_slot(sequence)
        del self.sequences[sequence.request.request_id]
        self.finished.append(Finished(sequence.request.request_id, reason, output, message))

    # ---- slots and blocks ---------------------------------------------------------------------

    def leave_slot(self, sequence: Sequence) -> None:
        """Void its rows in flight and free slot and blocks, once the last such plan commits."""
        slot = sequence.slot
        assert slot is not None
        self.open_blocks(slot)
        if self.controller is not None:
            self.controller.leave(slot)
        self.table.generation[slot] += 1
        self.owners[slot] = None
        sequence.slot = None
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        else:
            self.decoding.remove(slot)
            self.rows_version += 1
        self._count_stops(sequence, -1)
        flying = [flight for flight in self.flights if (flight.plan.slots == slot).any()]
        for flight in flying:
            flight.void_slots.append(slot)
        if flying:
            flying[-1].held_slots.append(slot)
        else:
            self.free_slot(slot)

    def free_slot(self, slot: int) -> None:
        self.pool.release(self.block_row(slot))
        self.table.capacity[slot] = 0
        self.table.free_slot(slot)
        self._released.append(slot)

    def block_row(self, slot: int) -> np.ndarray:
        """The blocks of a sequence by absolute index, a view."""
        return self.table.blocks[slot, : self.table.capacity[slot] // self.pool.block_size]

    def append_block_each(self, slots: list[int]) -> Reservation:
        """One more block for each of `slots`, in this order; one may be there more than once. The
        pool has enough."""
        table, size = self.table, self.pool.block_size
        blocks = self.pool.allocate(len(slots))
        # One by one: they are few, and an operation on arrays costs as much as several of them.
        appended, capacity = blocks.tolist(), []
        for slot, block in zip(slots, appended, strict=True):
            held = table.capacity.item(slot)
            table.blocks[slot, held // size] = block
            table.capacity[slot] = held + size
            capacity.append(held)
        indices = [positions // size for positions in capacity]
        self._appended = np.array((slots, indices, appended), dtype=np.int32)
        return Reservation(slots, capacity, blocks)

    def return_unused(self, reservation: Reservation, unused: list[int]) -> None:
        """Take back the blocks at the positions `unused`; their slots have got no other since."""
        self.pool.release_private(reservation.blocks[unused])
        for i in unused:
            self.table.capacity[reservation.slots[i]] = reservation.capacity[i]

    def append_blocks(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Give `counts[i]` (> 0) more blocks to `slots[i]`; int32. The pool has enough."""
        table, size = self.table, self.pool.block_size
        held = table.capacity[slots]
        rows, indices = _runs(slots, held // size, counts)
        blocks = self.pool.allocate(len(rows))
        table.blocks[rows, indices] = blocks
        table.capacity[slots] = held + counts * size
        self._appended = np.array((rows, indices, blocks), dtype=np.int32)

    def return_tails(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Take the last `counts[i]` (> 0) reserved and unused blocks back from `slots[i]`."""
        table, size = self.table, self.pool.block_size
        kept = table.capacity[slots] - counts * size
        rows, indices = _runs(slots, kept // size, counts)
        self.pool.release_private(table.blocks[rows, indices])
        table.capacity[slots] = kept

    def may_lengthen(self, match: Match) -> bool:
        """Whether more might be found once running sequences open what they have completed: their
        blocks come after nodes that the match went through, or are those that it stopped at."""
        if match.promised or (match.blocks and self.has_draft_kv):
            return True
        path = self.pool.uids_of(match.blocks)
        running = (self.owners[slot] for slot in (*self.decoding, *self.prefilling))
        return any(owner is not None and owner.chain_end.uid in path for owner in running)

    def open_stale_blocks(self) -> None:
        """For a lookup: open what running sequences have completed since the last one."""
        table = self.table
        running = np.asarray(self.decoding + self.prefilling, dtype=np.int32)
        kv_len = table.num_tokens[running] - table.todo[running]
        complete = kv_len - table.published[running] >= self.pool.block_size
        for slot in running[complete].tolist():
            self.open_blocks(slot)

    def open_blocks(self, slot: int) -> None:
        """Open the sequence's complete blocks to prefix hits. Nobody can see the difference to
        doing so after every step: it is done where a lookup might, and when the sequence leaves."""
        table, pool, sequence = self.table, self.pool, self.owners[slot]
        assert sequence is not None
        if not self.config.prefix_cache:
            return
        size = pool.block_size
        first, last = int(table.published[slot]) // size, table.kv_len(slot) // size
        if last > max(first, sequence.chain_blocks):
            blocks = table.blocks[slot, sequence.chain_blocks : last]
            self._name_blocks(sequence, table.tokens[slot], blocks)
        pool.mark_ready(table.blocks[slot, first:last])
        table.published[slot] = max(first, last) * size
        if self.has_draft_kv:
            drafted_blocks = table.draft_kv_len(slot) // size
            assert drafted_blocks >= 0, "the draft's KV is further behind than there is KV"
            pool.draft_valid[table.blocks[slot, :drafted_blocks]] = True

    def reset_executor(self) -> None:
        """All KV is lost: every running sequence goes back to the head of the queue."""
        self.last_commit_s = None
        self.doomed.clear()
        for flight in self.flights:
            for slot in flight.held_slots:
                self.free_slot(slot)
        self.flights.clear()
        for sequence in [owner for owner in self.owners if owner is not None]:
            self.preempt(sequence)
        self.pool.clear_cache()
        self._admitted.clear()
        self._appended = _NOTHING_APPENDED
        self._released.clear()
        self._reset = True

    # ---- deltas -------------------------------------------------------------------------------

    def take_deltas(self) -> Deltas:
        """What has changed since the previous plan."""
        to_zero = self.pool.take_to_zero()
        appended = self._appended
        quiet = appended is _NOTHING_APPENDED and not len(to_zero)
        if quiet and not (self._admitted or self._released or self._reset):
            return NO_DELTAS
        self._appended = _NOTHING_APPENDED
        deltas = Deltas(
            reset=self._reset,
            released=np.asarray(self._released, dtype=np.int32) if self._released else _NONE,
            zeroed_blocks=to_zero,
            admitted=tuple(self._admitted),
            append_slots=appended[0],
            append_indices=appended[1],
            append_blocks=appended[2],
        )
        self._reset = False
        self._released, self._admitted = [], []
        return deltas

    # ---- inside -------------------------------------------------------------------------------

    def _lookahead_cap(self, request: Request) -> int:
        if not self.speculates:
            return 0
        cap = request.params.max_lookahead
        return self.config.lookahead.k if cap is None else min(cap, self.config.lookahead.k)

    def _lookahead_end(self, sequence: Sequence) -> int:
        """A row with n known tokens drafts at most this - n: its last token is never a draft's
        successor, and the draft model reads no position beyond its own context."""
        end = sequence.max_total_tokens - 1
        draft_context = self.config.draft_context_tokens
        alone = self._chain(sequence.request) == (MODEL,)
        return min(end, draft_context) if alone and draft_context is not None else end

    def _catch_up_end(self, request: Request) -> int:
        """The draft model's context, for a row that is the model's first. Behind other drafters it
        seldom has its turn: what it then lacks would mostly be paid for in vain."""
        chain, draft_context = self._chain(request), self.config.draft_context_tokens
        first = bool(chain) and chain[0] == MODEL
        return draft_context if first and draft_context is not None else 0

    def _chain(self, request: Request) -> tuple[str, ...]:
        asked = request.params.drafter
        return self.config.default_chain if asked is None else asked

    def _name_blocks(self, sequence: Sequence, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """The next nodes of the sequence's chain: promised at admission, or complete."""
        end, first = sequence.chain_end, sequence.chain_blocks
        sequence.chain_end = self.pool.name_chain(blocks, end, tokens, first)
        sequence.chain_blocks += len(blocks)

    def _count_stops(self, sequence: Sequence, change: int) -> None:
        counts = self._stop_counts
        kinds = len(counts)
        for token_id in sequence.stop_ids:
            counts[token_id] = counts.get(token_id, 0) + change
            if counts[token_id] == 0:
                del counts[token_id]
        if len(counts) != kinds:
            self.stop_union = np.asarray(sorted(counts), dtype=np.int32)


def _runs(
    slots: np.ndarray, first: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(slot, index) for `counts[i]` consecutive indices from `first[i]` in each `slots[i]`."""
    if np.add.reduce(counts) == len(counts):  # the usual case, ten times as fast: one each
        return slots, first
    rows = np.repeat(slots, counts)
    ramp = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, np.repeat(first, counts) + ramp
