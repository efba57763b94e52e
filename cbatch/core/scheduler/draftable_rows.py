"""The decoding rows as a lookahead policy sees them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from cbatch.core.prices.step_work import StepWork
from cbatch.core.scheduler.caching_pool import ONE
from cbatch.core.scheduler.slot_table import DecodeBatch
from cbatch.core.scheduler.state import SchedulerState


class DraftableRows:
    """The decoding rows as a lookahead policy sees them (`policy.PlannedRows`), computed late."""

    def __init__(self, state: SchedulerState, batch: DecodeBatch, num_known: np.ndarray) -> None:
        self._state, self._batch, self._num_known = state, batch, num_known
        self.rows, self.num_rows = batch.rows, len(batch.slots)

    @cached_property
    def max_drafts(self) -> np.ndarray:
        state, batch = self._state, self._batch
        max_drafts = batch.max_drafts.num_drafts
        if state.in_flight or batch.tokens_until_end < state.policy.max_depth:
            max_drafts = np.minimum(max_drafts, np.maximum(self.remaining_tokens, 0))
        return max_drafts

    @cached_property
    def draft_kv_lag(self) -> np.ndarray:
        """Known tokens but the last that each row's draft KV lacks, int32 [rows]."""
        table, rows, num_known = self._state.table, self.rows, self._num_known
        if not self._state.has_draft_kv:
            return table.zeros[: self.num_rows]
        lag: np.ndarray = num_known - ONE - table.draft_kv[rows]
        if not self._state.decode_batch().all_catch_up:
            lag = lag * (num_known <= table.catch_up_end[rows])
        return lag

    @cached_property
    def budget_tokens(self) -> int:
        """Most drafts and catch-up tokens of all rows together. While prompts wait, it is at most
        half of the step's budget, and leaves time for a chunk within the target gap."""
        state, target_s = self._state, self._batch.itl_target_s
        has_prompts = bool(state.prefilling or state.waiting)
        budget = (state.config.max_num_batched_tokens - self.num_rows) >> has_prompts
        if target_s is not None:
            chunks, work = state.chunk_sizes, StepWork.decoding(self.num_rows, self.context_tokens)
            fitting = chunks.tokens_within(target_s, work, work.context_tokens // self.num_rows)
            if has_prompts:
                fitting -= chunks.chunk(work, 0, target_s)
            budget = max(min(budget, fitting), 0)
        return budget

    @property
    def context_tokens(self) -> int:
        return int(np.add.reduce(self._num_known))

    @cached_property
    def num_prompts(self) -> int:
        return len(self._state.prefilling) + min(
            len(self._state.waiting), self._state.table.num_free
        )

    @property
    def remaining_tokens(self) -> np.ndarray:
        remaining: np.ndarray = self._state.table.lookahead_end[self.rows] - self._num_known
        return remaining
