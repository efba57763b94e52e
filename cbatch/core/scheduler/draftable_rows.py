"""The decoding rows of a step that is being planned, as a lookahead policy sees them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from cbatch.core.scheduler.decode_batch import DecodeBatch
from cbatch.core.scheduler.slot_table import ONE
from cbatch.core.scheduler.state import SchedulerState
from cbatch.core.speculation.policy import StepBudget


class DraftableRows:
    """`policy.PlannedRows`: what nobody asks for is not worked out."""

    def __init__(self, state: SchedulerState, batch: DecodeBatch, known: np.ndarray) -> None:
        """`known` int32 [rows]: the tokens that each row will know at least."""
        self._state, self._batch, self._known = state, batch, known
        self.rows, self.num_rows = batch.rows, len(batch.slots)

    @cached_property
    def caps(self) -> np.ndarray:
        state, batch = self._state, self._batch
        most = batch.draft_limits(state.table).most.num_drafts
        if state.flights or batch.tokens_until_end < state.policy.max_depth:
            left: np.ndarray = np.maximum(state.table.lookahead_end[batch.rows] - self._known, 0)
            most = np.minimum(most, left)
        return most

    @cached_property
    def lag(self) -> np.ndarray:
        table, rows, known = self._state.table, self.rows, self._known
        if not self._state.has_draft_kv:
            return table.zeros[: self.num_rows]
        lag: np.ndarray = known - ONE - table.draft_kv[rows]
        if not self._state.decode_batch().draft_limits(table).all_catch_up:
            lag = lag * (known <= table.catch_up_end[rows])
        return lag

    @cached_property
    def budget_tokens(self) -> int:
        state, target_s = self._state, self._batch.itl_target_s
        budget = state.config.step_budget_tokens - self.num_rows
        has_prompts = bool(state.prefilling or state.waiting)
        if has_prompts:
            budget //= 2  # speculation does not starve prompts
        if target_s is not None:
            pairs, costs = self.room().context_tokens, state.step_costs
            within = costs.tokens_within(target_s, self.num_rows, pairs, pairs // self.num_rows)
            if has_prompts:
                within -= costs.chunk(self.num_rows, pairs, 0, target_s)
            budget = max(min(budget, within), 0)
        return budget

    def room(self) -> StepBudget:
        left_tokens: np.ndarray = self._state.table.lookahead_end[self.rows] - self._known
        return StepBudget(
            context_tokens=int(np.add.reduce(self._known)),
            left_tokens=left_tokens,
        )
