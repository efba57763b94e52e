"""Packing a step: decodes and their drafts, chunks of prompts, new requests."""

from __future__ import annotations

from functools import partial
from math import ceil

import msgspec
import numpy as np

from cbatch.core import lookahead
from cbatch.core.controller import Room
from cbatch.core.growth import Row, decide_growth, fit_drafts, in_turn
from cbatch.core.plan import QuietSteps, StepPlan
from cbatch.core.prompts import Chunk, Prompts
from cbatch.core.regime import Due
from cbatch.core.rowcache import RowCache, owners_of, select, slack_of
from cbatch.core.sequence import Drafts, Flight, Reservation, Sequence
from cbatch.core.state import SchedulerState

_NOTHING_RESERVED = Reservation([], [], np.zeros(0, dtype=np.intp))


class Decodes(msgspec.Struct):
    """The decoding rows of a step. `rows` selects `slots` in the table, as a slice if it can."""

    slots: np.ndarray
    rows: slice | np.ndarray
    drafts: Drafts
    catch_up: np.ndarray
    catch_up_total: int
    may_end: bool = True  # some row may reach its last token
    reservation: Reservation | None = None  # all blocks appended for this step; None: not known
    preempted: bool = False  # a sequence was preempted for them: nothing is admitted this step


class Planner:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._next_step_id = 0
        self._cache = RowCache.of(state)
        self._prompts = Prompts(state)

    def plan(self, num_steps: int) -> StepPlan | None:
        """The next step; or so many, which are quiet."""
        state = self.state
        if num_steps > 1 or self._goes_on():
            return self._go_on(num_steps)
        decodes = self._decodes()
        chunks: list[Chunk] = []
        if state.prefilling or (state.waiting and state.table.num_free):
            left = state.config.step_budget_tokens - len(decodes.slots)
            left -= decodes.drafts.total
            left -= ceil(decodes.catch_up_total * state.config.catch_up_price)
            chunks = self._prompts.go_on(left)
            left -= sum(chunk.query_len for chunk in chunks)
            if not (decodes.preempted or state.doomed):
                chunks += self._prompts.admit(left)
        if not (len(decodes.slots) or chunks):
            return None
        return self._build(decodes, chunks)

    # ---- quiet steps --------------------------------------------------------------------------

    def quiet_steps(self) -> QuietSteps | None:
        """See `Scheduler.quiet_steps`."""
        state = self.state
        if state.speculates or len(state.stop_union) or not self._is_quiet():
            return None
        cache = self._cache
        if cache.slack_tokens < 1:
            cache.slack_tokens = slack_of(state, cache.rows)
        # The one after the slack is the first that may end somebody, and may be the last of many.
        # No row needs more blocks for them than these.
        blocks_each = state.pool.num_available // len(cache.slots)
        num_steps = min(cache.slack_tokens + 1, blocks_each * state.pool.block_size)
        return QuietSteps(cache.slots, num_steps) if num_steps > 0 else None

    def _is_quiet(self) -> bool:
        """Whether nobody prefills and nobody can enter, so that those who decode are all there is;
        the cache is of them."""
        state = self.state
        if state.flights or state.prefilling or (state.waiting and state.table.num_free):
            return False
        if self._cache.version != state.rows_version:
            self._cache = RowCache.of(state)
        return len(self._cache.slots) > 0

    def _goes_on(self) -> bool:
        """Whether in this step the rows decode one token each, none is near its end and none may
        draft, nobody can enter, and there is a block for each of them."""
        if not self._is_quiet():
            return False
        state, cache = self.state, self._cache
        return (
            cache.slack_tokens >= state.most_emitted
            and cache.never_drafts
            and len(cache.slots) <= state.pool.num_available
        )

    def _go_on(self, num_steps: int) -> StepPlan:
        """What the long way would plan, without asking again what does not change meanwhile."""
        state, table, cache = self.state, self.state.table, self._cache
        rows, drafts = cache.rows, cache.no_drafts
        may_end = num_steps > cache.slack_tokens
        cache.slack_tokens -= num_steps * state.most_emitted
        spare = table.capacity[rows] - table.num_tokens[rows]
        short = (spare < num_steps - 1).nonzero()[0]
        if len(short):
            size = state.pool.block_size
            state.append_block_each(in_turn(cache.index[short], spare[short], num_steps, size))
        plan = StepPlan(
            self._next_step_id,
            cache.slots,
            cache.generations,
            drafts.query_lens,
            drafts.num_drafts,
            drafts.num_drafts,
            cache.trues,
            state.take_deltas(),
            num_steps,
        )
        self._next_step_id += num_steps
        owners = cache.owners
        flight = Flight(plan, rows, owners, drafts, True, False, may_end, None, [], [])
        state.flights.append(flight)
        return plan

    # ---- decoding rows ------------------------------------------------------------------------

    def _decodes(self) -> Decodes:
        state, table = self.state, self.state.table
        if self._cache.version != state.rows_version:
            self._cache = RowCache.of(state)
        cache = self._cache
        slots, rows, drafts = cache.slots, cache.rows, cache.no_drafts
        if state.flights:
            return self._decodes_in_flight()
        decodes = Decodes(slots, rows, drafts, drafts.num_drafts, 0)
        if not len(slots):
            return decodes
        known = table.num_tokens[rows]
        near_end = cache.slack_tokens < state.most_emitted
        if near_end:
            cache.slack_tokens = slack_of(state, rows)
            near_end = cache.slack_tokens < state.most_emitted
        cache.slack_tokens -= state.most_emitted
        decodes.may_end = near_end
        due = self._due(len(slots))
        if due is Due.NOTHING:
            return self._grow(decodes, known)
        caps = cache.most_drafts
        if near_end:
            left = np.maximum(table.lookahead_end[rows] - known, 0)
            caps = Drafts.of(np.minimum(caps.num_drafts, left))
        self._speculate(decodes, caps, self._catch_up(rows, table.draft_lag[rows], known), due)
        return self._grow(decodes, known + decodes.drafts.num_drafts)

    def _decodes_in_flight(self) -> Decodes:
        """The same while a plan is uncommitted, by bounds."""
        state, table, cache = self.state, self.state.table, self._cache
        slots, rows, drafts = cache.slots, cache.rows, cache.no_drafts
        known, reach = self._bounds()
        cache.slack_tokens = 0  # it counts only what steps outside an overlap emit
        # A row whose plan in flight is certain to reach max_tokens has nothing left to do.
        open_rows = known[rows] < table.max_total[rows]
        for sequence in state.doomed:
            open_rows &= slots != sequence.slot
        if not open_rows.all():
            slots = slots[open_rows]
            rows, drafts = select(slots), Drafts.of(drafts.num_drafts[: len(slots)])
        decodes = Decodes(slots, rows, drafts, drafts.num_drafts, 0)
        if not len(slots):
            return decodes
        due = self._due(len(slots))
        if due is not Due.NOTHING:
            lag = table.draft_lag + known - table.num_tokens + table.todo - 1
            caps = np.maximum(table.lookahead_end[rows] - known[rows], 0)
            caps = np.minimum(table.max_lookahead[rows], caps)
            catch_up = self._catch_up(rows, lag[rows], known[rows])
            self._speculate(decodes, Drafts.of(caps), catch_up, due)
        # Two bounds together may pass the end.
        reach = np.minimum(reach[rows] + decodes.drafts.num_drafts, table.max_total[rows])
        return self._grow(decodes, reach)

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """By slot: the tokens it knows at least, and the positions it needs at most for one more
        token, once the plans in flight have committed."""
        table = self.state.table
        known = table.num_tokens.copy()
        reach = table.num_tokens - table.todo + 1
        for flight in self.state.flights:
            known[flight.rows] += flight.plan.wants_logits
            reach[flight.rows] += flight.plan.query_lens
        return known, reach

    def _catch_up(self, rows: slice | np.ndarray, lag: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Of the tokens that the draft's KV is behind, int32 [rows], those that may be planned."""
        if self._cache.all_catch_up:
            return lag
        planned: np.ndarray = lag * (known <= self.state.table.catch_up_end[rows])
        return planned

    def _due(self, num_rows: int) -> Due:
        """What this step asks of the lookahead policy; those without a controller always decide,
        where a row may draft at all."""
        state = self.state
        if not self._cache.most_drafts.total:
            return Due.NOTHING
        return Due.DECISION if state.controller is None else state.controller.due(num_rows)

    def _speculate(self, decodes: Decodes, caps: Drafts, lag: np.ndarray, due: Due) -> None:
        """Drafts and catch-up tokens per row, before blocks are considered.

        `caps` is what request and context allow, `lag` what the draft's KV has to catch up."""
        state, config, rows = self.state, self.state.config, decodes.rows
        most = caps.num_drafts
        budget = config.step_budget_tokens - len(most)
        if state.prefilling or state.waiting:
            budget //= 2  # speculation does not starve prompts
        num_drafts: np.ndarray | None
        if state.controller is None:
            num_drafts = lookahead.choose_lookahead(
                config.lookahead, state.table.estimate, rows, most
            )
        else:
            room = partial(self._room, rows, most, budget)
            num_drafts = state.controller.choose(due, rows, most, lag, budget, room)
            if num_drafts is None:
                return
        drafts = caps if num_drafts is most else Drafts.of(num_drafts)
        catch_up_total = int(np.add.reduce(lag))
        if drafts.by_all and drafts.total + catch_up_total <= budget:
            catch_up = lag.copy()
        else:
            first = self._next_step_id % len(most)
            fitting, catch_up, total = fit_drafts(num_drafts, lag, budget, first)
            drafts = drafts if fitting is num_drafts else Drafts.of(fitting)
            catch_up_total = total - drafts.total
        decodes.drafts, decodes.catch_up = drafts, catch_up
        decodes.catch_up_total = catch_up_total

    def _room(self, rows: slice | np.ndarray, most: np.ndarray, budget: int) -> Room:
        """What the step has for drafts. Prompts are counted as far as they can go on."""
        state, table = self.state, self.state.table
        chunk_tokens = 0
        if state.prefilling:
            todo = int(np.add.reduce(table.todo[state.prefilling]))
            chunk_tokens = min(todo, state.config.step_budget_tokens - len(most) - budget)
        known = table.num_tokens[rows]
        free = state.pool.num_available * state.pool.block_size
        blocks = None
        if free < state.config.lookahead.k * len(most):
            blocks = np.maximum(table.capacity[rows] - known, 0), free
        left_tokens: np.ndarray = table.lookahead_end[rows] - known
        return Room(
            base_tokens=len(most) + chunk_tokens,
            context_tokens=int(np.add.reduce(known)),
            left_tokens=left_tokens,
            blocks=blocks,
        )

    def _grow(self, decodes: Decodes, reach: np.ndarray) -> Decodes:
        """Blocks for positions up to `reach`, int32 [rows]; if there are not enough, fewer rows."""
        state, table = self.state, self.state.table
        size = state.pool.block_size
        short = (reach > table.capacity[decodes.rows]).nonzero()[0]
        if state.most_emitted <= size and not state.flights:
            if not len(short):
                decodes.reservation = _NOTHING_RESERVED
                return decodes
            if len(short) <= state.pool.num_available:
                decodes.reservation = state.append_block_each(self._cache.index[short].tolist())
                return decodes
        elif not len(short):
            return decodes
        else:
            growing = decodes.slots[short].astype(np.intp)
            extra = (reach[short] - table.capacity[growing] + (size - 1)) // size
            if np.add.reduce(extra) <= state.pool.num_available:
                state.append_blocks(growing, extra)
                return decodes
        return self._grow_short(decodes.slots, decodes.drafts.num_drafts, decodes.catch_up)

    def _grow_short(
        self, slots: np.ndarray, num_drafts: np.ndarray, catch_up: np.ndarray
    ) -> Decodes:
        """Blocks do not suffice for everybody: decide who runs, then preempt and append."""
        state, table, pool = self.state, self.state.table, self.state.pool
        wanted = dict(zip(slots.tolist(), num_drafts.tolist(), strict=True))
        running = [owner for owner in state.owners if owner is not None]
        reach = self._bounds()[1]
        rows = [self._row(owner, wanted, reach) for owner in running if not owner.doomed]
        held_back = [slot for flight in state.flights for slot in flight.held_slots]
        leaving = held_back + [s.slot for s in state.doomed if s.slot is not None]
        coming = sum(pool.count_sole(state.block_row(slot)) for slot in leaving)
        growth = decide_growth(rows, pool.num_available, coming, pool.block_size)
        for victim in growth.victims:
            sequence = state.owners[victim]
            assert sequence is not None
            if self._in_flight(victim):
                sequence.doomed = True
                state.doomed.append(sequence)
            else:
                state.preempt(sequence)
        keep = np.asarray([slot in growth.granted_drafts for slot in slots.tolist()], dtype=bool)
        slots = slots[keep]
        granted = [growth.granted_drafts[slot] for slot in slots.tolist()]
        drafts = Drafts.of(np.asarray(granted, dtype=np.int32))
        catch_up = catch_up[keep]
        need = np.minimum(reach[slots] + drafts.num_drafts, table.max_total[slots])
        extra = -(-(need - table.capacity[slots]) // pool.block_size)
        if len(growing := slots[extra > 0]):
            state.append_blocks(growing, extra[extra > 0])
        preempted = bool(growth.victims)
        behind = int(catch_up.sum())
        return Decodes(slots, select(slots), drafts, catch_up, behind, preempted=preempted)

    def _row(self, sequence: Sequence, wanted: dict[int, int], reach: np.ndarray) -> Row:
        table, slot = self.state.table, sequence.slot
        assert slot is not None
        gained = int(table.num_tokens[slot]) - sequence.tokens_at_admission
        return Row(
            slot=slot,
            rank=sequence.rank,
            decodes=slot in wanted,
            kv_tokens=int(reach[slot]) - 1,
            num_drafts=wanted.get(slot, 0),
            max_tokens=int(table.max_total[slot]),
            blocks_held=len(self.state.block_row(slot)),
            blocks_freed=self.state.pool.count_sole(self.state.block_row(slot)),
            in_flight=self._in_flight(slot),
            protected=sequence.preemptions > 0 and gained < self.state.pool.block_size,
        )

    def _in_flight(self, slot: int) -> bool:
        return any((flight.plan.slots == slot).any() for flight in self.state.flights)

    # ---- the plan -----------------------------------------------------------------------------

    def _build(self, decodes: Decodes, chunks: list[Chunk]) -> StepPlan:
        state, table, cache = self.state, self.state.table, self._cache
        slots, drafts = decodes.slots, decodes.drafts
        num_drafts, query_lens = drafts.num_drafts, drafts.query_lens
        generations, owners, wants = cache.generations, cache.owners, cache.trues
        if slots is not cache.slots:
            generations, wants = table.generation[slots], np.ones(len(slots), dtype=np.bool_)
            owners = owners_of(state, slots.tolist())
        plain = not (drafts.total or decodes.catch_up_total)
        rows, catch_up = decodes.rows, decodes.catch_up
        if chunks:
            plain = False
            more = [(c.slot, table.generation.item(c.slot), c.query_len, 0, 0) for c in chunks]
            # Column by column it would cost three times as much.
            columns = np.empty((5, len(slots) + len(chunks)), dtype=np.int32)
            columns[:, : len(slots)] = slots, generations, query_lens, num_drafts, catch_up
            columns.T[len(slots) :] = more
            slots, generations, query_lens, num_drafts, catch_up = columns
            rows = slots.astype(np.intp)
            owners = owners + owners_of(state, [chunk.slot for chunk in chunks])
            drafts = Drafts(num_drafts, query_lens, drafts.total, by_all=False)
            wants = table.trues[: len(slots)].copy()
            wants[-len(chunks) :] = [chunk.last for chunk in chunks]
        for chunk in chunks:
            if chunk.last:
                state.start_decoding(chunk.slot)
        plan = StepPlan(
            step_id=self._next_step_id,
            slots=slots,
            generations=generations,
            query_lens=query_lens,
            num_drafts=num_drafts,
            catch_up=catch_up,
            wants_logits=wants,
            deltas=state.take_deltas(),
        )
        self._next_step_id += 1
        has_chunks = bool(chunks)
        may_end = decodes.may_end or has_chunks
        reservation = decodes.reservation
        flight = Flight(plan, rows, owners, drafts, plain, has_chunks, may_end, reservation, [], [])
        state.flights.append(flight)
        return plan
