"""Invariants of a scheduler that hold between any two calls of it."""

from __future__ import annotations

import numpy as np

from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.slot_pages import SlotPages
from cbatch.core.scheduler.state import SchedulerState


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise `AssertionError` if an invariant is violated."""
    state, table = scheduler.state, scheduler.state.table
    state.pool.check()
    references = np.zeros(state.pool.num_blocks, dtype=np.int32)
    leaving = [slot for step in state.in_flight for slot in step.slots_to_free]
    running = [owner for owner in state.owners if owner is not None]
    for slot in [*leaving, *(owner.slot for owner in running if owner.slot is not None)]:
        references[state.block_row(slot)] += 1
    assert (references == state.pool.ref_counts).all(), "references and tables disagree"
    if state.pages is not None:
        _check_pages(state, state.pages, leaving)
    slots = sorted([*state.prefilling, *state.decoding])
    assert slots == sorted(owner.slot for owner in running if owner.slot is not None)
    assert len(slots) + len(leaving) + table.num_free == scheduler.config.max_num_seqs
    assert len(running) + len(state.waiting) == len(state.sequences)
    for owner in running:
        _check_row(state, owner)
    _check_batch(state)


def _check_pages(state: SchedulerState, pages: SlotPages, leaving: list[int]) -> None:
    """Check the references of state pages, and that each row has those it needs and no others."""
    table, size, in_flight = state.table, state.pool.block_size, state.in_flight
    references = np.zeros(pages.pool.size, dtype=np.int32)
    for slot in {*leaving, *state.decoding, *state.prefilling}:
        own_pages = pages.tables[slot][pages.tables[slot] >= 0]
        references[own_pages] += 1
    assert (references == pages.pool.ref_counts).all(), "page references and tables disagree"
    assert pages.room(overlaps=len(in_flight) > 1) >= 0, "slots may run out of pages"
    for slot in (*state.decoding, *state.prefilling):
        current = table.kv_len(slot) // size
        boundaries = (pages.tables[slot] >= 0).nonzero()[0].tolist()
        assert pages.current[slot] == current
        assert not boundaries or boundaries[0] >= max(current, 1), (
            "a passed page is still the slot's"
        )
        assert not current or boundaries[0] == current, "the state to continue from has no page"
        if slot in state.decoding:
            pending = [step.plan.query_lens[step.plan.slots == slot].sum() for step in in_flight]
            reached = table.kv_len(slot) + int(sum(pending))
            last = min(reached, int(table.max_total[slot])) // size
            assert boundaries[-1:] <= [max(last, current + 1)], "a page is reserved and unused"
            assert not last or boundaries[-1] >= last, "a plan in flight has no page"


def _check_row(state: SchedulerState, owner: Sequence) -> None:
    table, slot = state.table, owner.slot
    assert slot is not None
    tokens, kv_len = int(table.num_tokens[slot]), table.kv_len(slot)
    assert owner.num_prompt_tokens <= tokens < owner.max_total_tokens
    assert 0 <= table.draft_kv[slot] <= kv_len <= tokens - 1
    plans = [step.plan for step in state.in_flight]
    pending_tokens = [plan.query_lens[plan.slots == slot].sum() for plan in plans]
    used_tokens = min(kv_len + int(sum(pending_tokens)), owner.max_total_tokens)
    assert used_tokens <= table.capacity[slot], "computes beyond its blocks"
    if slot in state.decoding and not any(pending_tokens):
        assert kv_len == tokens - 1, f"kv_len {kv_len}, but {tokens} tokens are known"
    kept_tokens = max(used_tokens, int(table.reserved_tokens[slot]))
    spare_tokens = int(table.capacity[slot]) - kept_tokens
    assert spare_tokens < state.pool.block_size, (
        f"{spare_tokens} tokens are reserved and not released"
    )


def _check_batch(state: SchedulerState) -> None:
    """Check that the batch which is kept, if one is, is the batch of all decoding rows."""
    table, batch = state.table, state.cached_batch
    if batch is None:
        return
    decoding = state.owners_of(state.decoding)
    assert len(decoding) == len(batch.owners), "the set of decoding rows has changed"
    assert all(a is b for a, b in zip(decoding, batch.owners, strict=True))
    assert (batch.generations == table.generation[batch.index]).all()
    until_end = table.lookahead_end[batch.index] - table.num_tokens[batch.index]
    assert (until_end >= batch.tokens_until_end).all(), "has fewer remaining tokens than recorded"
