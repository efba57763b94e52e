"""Invariants of a scheduler that hold between any two calls of it."""

from __future__ import annotations

import numpy as np

from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Sequence
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
    slots = sorted([*state.prefilling, *state.decoding])
    assert slots == sorted(owner.slot for owner in running if owner.slot is not None)
    assert len(slots) + len(leaving) + table.num_free == scheduler.config.max_num_seqs
    assert len(running) + len(state.waiting) == len(state.sequences)
    for owner in running:
        _check_row(state, owner)
    _check_batch(state)


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
