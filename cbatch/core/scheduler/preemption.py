"""Who gets tokens and blocks when there are not enough: pure decisions, applied elsewhere."""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.scheduler.queue import Rank


def fit_drafts(
    num_drafts: np.ndarray, lag: np.ndarray, budget_tokens: int, first: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Drafts and catch-up tokens per row within a token budget, int32 [rows], and their total.

    A row that drafts pays for its drafts and for the `lag` tokens its draft KV is behind. Rows are
    served in turn starting at row `first`, so that none is always last. The row at the edge gets
    what is left: a shorter draft, or a slice of its catch-up and no draft yet.
    """
    lag = lag * (num_drafts > 0)
    cost = num_drafts + lag
    total = int(np.add.reduce(cost))
    if total <= budget_tokens:
        return num_drafts, lag, total
    order = np.roll(np.arange(len(cost)), -first)
    left = budget_tokens - (np.cumsum(cost[order]) - cost[order])  # before each row, in turn
    drafts = num_drafts.copy()
    catch_up = lag.copy()
    catch_up[order] = np.clip(left, 0, lag[order])
    drafts[order] = np.clip(left - lag[order], 0, num_drafts[order])
    return drafts, catch_up, int(np.add.reduce(drafts + catch_up))


class PreemptionCandidate(msgspec.Struct, frozen=True):
    """A running sequence, for a decision about blocks."""

    slot: int
    rank: Rank
    decodes: bool  # wants to compute 1 + num_drafts tokens now
    kv_tokens: int  # positions it may already use, plans in flight included
    num_drafts: int
    max_tokens: int  # it never holds more positions than these
    blocks_held: int
    blocks_freed: int  # blocks that become available if it is preempted
    in_flight: bool  # its blocks are only freed once a plan in flight commits
    protected: bool  # was preempted before and has not gained a block since


class Growth(msgspec.Struct, frozen=True):
    granted_drafts: dict[int, int]  # by slot, for the rows that may run
    victims: list[int]  # slots to preempt, in the order they were chosen


def decide_growth(
    rows: list[PreemptionCandidate], available_blocks: int, coming_blocks: int, block_size: int
) -> Growth:
    """Which rows decode now, with how many drafts, and who is preempted for them.

    In service order each row first gets the block for its next token. When none is left, the victim
    is the last in service order that is not protected, possibly the row itself, never one before
    it. Drafts share what remains afterwards: speculation never causes a preemption. A row whose
    block is among the `coming_blocks` (freed once a plan in flight commits) sits this step out.
    """
    by_rank = sorted(rows, key=lambda row: row.rank)
    gone: dict[int, None] = {}
    left, coming = available_blocks, coming_blocks
    runs: list[PreemptionCandidate] = []
    for place, row in enumerate(by_rank):
        if not row.decodes or row.slot in gone:
            continue
        need = _blocks_beyond(row, 1, block_size)
        while need > left + coming and row.slot not in gone:
            behind = (r for r in reversed(by_rank[place + 1 :]) if r.slot not in gone)
            victim = next((r for r in behind if not r.protected), row)
            gone[victim.slot] = None
            if victim.in_flight:
                coming += victim.blocks_freed
            else:
                left += victim.blocks_freed
        if row.slot in gone:
            continue
        if need <= left:
            left -= need
            runs.append(row)
        else:
            coming -= need - left
            left = 0
    granted = {}
    for row in runs:
        base = row.blocks_held + _blocks_beyond(row, 1, block_size)
        room_tokens = (base + left) * block_size
        drafts = row.num_drafts
        if room_tokens < row.max_tokens:
            drafts = min(drafts, room_tokens - row.kv_tokens - 1)
        left -= _blocks_beyond(row, 1 + drafts, block_size) - (base - row.blocks_held)
        granted[row.slot] = drafts
    return Growth(granted, list(gone))


def _blocks_beyond(row: PreemptionCandidate, tokens: int, block_size: int) -> int:
    needed_tokens = min(row.kv_tokens + tokens, row.max_tokens)
    return max(0, -(-needed_tokens // block_size) - row.blocks_held)
