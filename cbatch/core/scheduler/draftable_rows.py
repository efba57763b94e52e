"""The decoding rows of a step that is being planned, as a lookahead policy sees them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from cbatch.core.scheduler.decode_batch import DecodeBatch
from cbatch.core.scheduler.slot_table import ONE
from cbatch.core.scheduler.state import SchedulerState


class DraftableRows:
    """`policy.PlannedRows`; each property is computed when it is first read."""

    def __init__(self, state: SchedulerState, batch: DecodeBatch, num_known: np.ndarray) -> None:
        """`num_known`, int32 [rows]: tokens of each row once the plans in flight are committed, at
        least."""
        self._state, self._batch, self._num_known = state, batch, num_known
        self.rows, self.num_rows = batch.rows, len(batch.slots)

    @cached_property
    def max_drafts(self) -> np.ndarray:
        """Most drafts of each row, int32 [rows]."""
        state, batch = self._state, self._batch
        max_drafts = batch.draft_limits(state.table).max_tokens.num_drafts
        if state.in_flight or batch.tokens_until_end < state.policy.max_depth:
            max_drafts = np.minimum(max_drafts, np.maximum(self.remaining_tokens, 0))
        return max_drafts

    @cached_property
    def draft_kv_lag(self) -> np.ndarray:
        """Known tokens of each row that its draft KV lacks, without the last one, int32 [rows]."""
        table, rows, num_known = self._state.table, self.rows, self._num_known
        if not self._state.has_draft_kv:
            return table.zeros[: self.num_rows]
        lag: np.ndarray = num_known - ONE - table.draft_kv[rows]
        if not self._state.decode_batch().draft_limits(table).all_catch_up:
            lag = lag * (num_known <= table.catch_up_end[rows])
        return lag

    @cached_property
    def budget_tokens(self) -> int:
        """Drafts and catch-up tokens of all rows, at most. While prompts wait, drafts get half of
        the step's budget, and leave time for a chunk within the target gap between tokens."""
        state, target_s = self._state, self._batch.itl_target_s
        budget = state.config.max_num_batched_tokens - self.num_rows
        has_prompts = bool(state.prefilling or state.waiting)
        if has_prompts:
            budget //= 2
        if target_s is not None:
            pairs, costs = self.context_tokens, state.step_costs
            fitting = costs.tokens_within(target_s, self.num_rows, pairs, pairs // self.num_rows)
            if has_prompts:
                fitting -= costs.chunk(self.num_rows, pairs, 0, target_s)
            budget = max(min(budget, fitting), 0)
        return budget

    @property
    def context_tokens(self) -> int:
        """Known tokens of all rows together."""
        return int(np.add.reduce(self._num_known))

    @property
    def remaining_tokens(self) -> np.ndarray:
        """Tokens that each row may still draft, int32 [rows]."""
        remaining: np.ndarray = self._state.table.lookahead_end[self.rows] - self._num_known
        return remaining
