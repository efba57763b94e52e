"""Decisions about tokens and blocks when there are too few. `schedule` applies them."""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.scheduler.queue import Rank
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.state import SchedulerState


def fit_drafts(
    num_drafts: np.ndarray, lag: np.ndarray, budget_tokens: int, first: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return drafts and catch-up tokens per row within a token budget, int32 [rows], and their sum.

    A row that drafts takes its drafts and the `lag` tokens that its draft KV lacks from the budget.
    Rows are served in order starting at row `first`, which the caller varies, so that no row is
    always last. The row that exhausts the budget gets the remainder: fewer drafts, or a slice of
    its catch-up and no drafts yet.
    """
    lag = lag * (num_drafts > 0)
    cost = num_drafts + lag
    total = int(np.add.reduce(cost))
    if total <= budget_tokens:
        return num_drafts, lag, total
    order = np.roll(np.arange(len(cost)), -first)
    remaining = budget_tokens - (np.cumsum(cost[order]) - cost[order])  # before each row, in order
    drafts = num_drafts.copy()
    catch_up = lag.copy()
    catch_up[order] = np.clip(remaining, 0, lag[order])
    drafts[order] = np.clip(remaining - lag[order], 0, num_drafts[order])
    return drafts, catch_up, int(np.add.reduce(drafts + catch_up))


class PreemptionCandidate(msgspec.Struct, frozen=True):
    """A running sequence that may grow or be preempted."""

    slot: int
    rank: Rank
    decodes: bool  # computes 1 + num_drafts tokens in this step, if it runs
    kv_tokens: int  # positions it may use already, plans in flight included
    num_drafts: int
    max_tokens: int  # most positions that it will ever use
    blocks_held: int
    blocks_freed: int  # blocks that become available if it is preempted
    in_flight: bool  # its blocks are freed only when a plan in flight commits
    protected: bool  # was preempted before and has not filled a block since


class Growth(msgspec.Struct, frozen=True):
    """The rows that run in a step, and the sequences that are preempted for them."""

    granted_drafts: dict[int, int]  # by slot, of the rows that run
    victims: list[int]  # slots to preempt, in the order they were chosen


def decide_growth(
    rows: list[PreemptionCandidate], available_blocks: int, pending_blocks: int, block_size: int
) -> Growth:
    """Decide which rows decode in this step, with how many drafts, and which are preempted.

    In service order each row first gets the block for its next token. If no block is free, the
    victim is the last unprotected row after this row in service order, or else this row itself.
    Drafts share the blocks that remain afterwards: speculation never causes a preemption. A row
    whose block is among the `pending_blocks`, which are freed when a plan in flight commits, does
    not run in this step.
    """
    by_rank = sorted(rows, key=lambda row: row.rank)
    victims: dict[int, None] = {}  # by slot, in order
    free, pending = available_blocks, pending_blocks
    running: list[PreemptionCandidate] = []
    for index, row in enumerate(by_rank):
        if not row.decodes or row.slot in victims:
            continue
        need = _blocks_beyond(row, 1, block_size)
        while need > free + pending and row.slot not in victims:
            later = (r for r in reversed(by_rank[index + 1 :]) if r.slot not in victims)
            victim = next((r for r in later if not r.protected), row)
            victims[victim.slot] = None
            if victim.in_flight:
                pending += victim.blocks_freed
            else:
                free += victim.blocks_freed
        if row.slot in victims:
            continue
        if need <= free:
            free -= need
            running.append(row)
        else:
            pending -= need - free
            free = 0
    granted = {}
    for row in running:
        base = row.blocks_held + _blocks_beyond(row, 1, block_size)
        max_positions = (base + free) * block_size
        drafts = row.num_drafts
        if max_positions < row.max_tokens:
            drafts = min(drafts, max_positions - row.kv_tokens - 1)
        free -= _blocks_beyond(row, 1 + drafts, block_size) - (base - row.blocks_held)
        granted[row.slot] = drafts
    return Growth(granted, list(victims))


def _blocks_beyond(row: PreemptionCandidate, tokens: int, block_size: int) -> int:
    needed_tokens = min(row.kv_tokens + tokens, row.max_tokens)
    return max(0, -(-needed_tokens // block_size) - row.blocks_held)


def candidate_of(
    state: SchedulerState,
    sequence: Sequence,
    drafts_by_slot: dict[int, int],
    max_kv_len: np.ndarray,
) -> PreemptionCandidate:
    table, slot = state.table, sequence.slot
    assert slot is not None
    new_tokens = int(table.num_tokens[slot]) - sequence.tokens_at_admission
    blocks = state.block_row(slot)
    return PreemptionCandidate(
        slot=slot,
        rank=sequence.rank,
        decodes=slot in drafts_by_slot,
        kv_tokens=int(max_kv_len[slot]) - 1,
        num_drafts=drafts_by_slot.get(slot, 0),
        max_tokens=int(table.max_total[slot]),
        blocks_held=len(blocks),
        blocks_freed=state.pool.count_unshared(blocks),
        in_flight=is_in_flight(state, slot),
        protected=sequence.preemptions > 0 and new_tokens < state.pool.block_size,
    )


def is_in_flight(state: SchedulerState, slot: int | None) -> bool:
    return any((step.plan.slots == slot).any() for step in state.in_flight)
