"""Many steps at once, for a simulator: as long as the same rows decode one token each and nothing
else can happen, only their times and tokens are news."""

from __future__ import annotations

import numpy as np

from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.slot_table import advance
from cbatch.core.scheduler.state import SchedulerState

_NO_SLOTS = np.zeros(0, dtype=np.int32)


class FastForward:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def ahead(self) -> tuple[np.ndarray, int]:
        """Slots of the rows that decode, and the number of next steps that are sure to be theirs
        alone if no call comes between: 0 where that is not known. In the last a row may end."""
        state, table = self.state, self.state.table
        if (
            state.prefilling
            or state.flights
            or state.policy.max_depth
            or len(state.stop_union)
            or state.pending_preemption
            or (state.waiting and table.num_free)
        ):
            return _NO_SLOTS, 0
        batch, pool = state.decode_batch(), state.pool
        if not batch.owners:
            return _NO_SLOTS, 0
        left_tokens = table.max_total[batch.rows] - table.num_tokens[batch.rows]
        steps = min(left_tokens.tolist())
        if pool.num_blocks_for(steps) * len(batch.owners) > pool.num_available:  # at the most
            while steps and int(np.add.reduce(self._lacks(steps))) > pool.num_available:
                steps //= 2
        return batch.slots, steps

    def take(self, tokens: np.ndarray, target_s: float, now_s: float) -> None:
        """As many steps, no more than `ahead` said, as `tokens` int32 [steps, rows] has, `target_s`
        in the target; the last ended `now_s`. Nobody is told of the blocks that they took."""
        state, table, stats = self.state, self.state.table, self.state.stats
        batch, steps = state.decode_batch(), len(tokens)
        rows = batch.rows
        lacks = self._lacks(steps)
        short = lacks.nonzero()[0]
        if len(short):
            state.give_blocks(batch.index[short], lacks[short])
        where = table.row_start[rows] + table.num_tokens[rows]
        table.flat_tokens[where + np.arange(steps)[:, None]] = tokens
        advance(table.num_tokens, rows, steps)
        batch.tokens_until_end -= steps
        state.last_commit_s = now_s
        stats.steps += steps
        stats.emitted_tokens += tokens.size
        stats.target_s += target_s
        for row in (table.num_tokens[rows] >= table.max_total[rows]).nonzero()[0].tolist():
            state.end(batch.owners[row], FinishReason.LENGTH)

    def _lacks(self, steps: int) -> np.ndarray:
        """Blocks that each row has too few of, for so many steps: int32 [rows]."""
        table, size = self.state.table, self.state.pool.block_size
        rows = self.state.decode_batch().rows
        reach = table.num_tokens[rows] + (steps - 1) - table.capacity[rows]
        lacks: np.ndarray = np.maximum(-(-reach // size), 0)
        return lacks
