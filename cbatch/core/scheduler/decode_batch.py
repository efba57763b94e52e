"""The rows of a step: who decodes, how many tokens each row computes, and the plan in flight."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.slot_table import ONE, SlotTable


class RowTokens(msgspec.Struct, frozen=True, eq=False):
    """How many tokens each row computes, int32 [rows], and what follows from it. Steps that compute
    the same may share one."""

    num_drafts: np.ndarray
    query_lens: np.ndarray  # one more, or a chunk
    catch_up: np.ndarray
    total_drafts: int
    total_catch_up: int = 0
    all_draft: bool = False
    num_chunks: int = 0  # rows that prefill

    @classmethod
    def of(cls, num_drafts: np.ndarray, catch_up: np.ndarray, total_catch_up: int) -> RowTokens:
        total = int(np.add.reduce(num_drafts))
        all_draft = bool(np.count_nonzero(num_drafts) == len(num_drafts))
        return cls(num_drafts, num_drafts + ONE, catch_up, total, total_catch_up, all_draft)

    def with_catch_up(self, catch_up: np.ndarray, total: int) -> RowTokens:
        drafts = self.num_drafts, self.query_lens, catch_up, self.total_drafts
        return RowTokens(*drafts, total, self.all_draft)

    @property
    def plain(self) -> bool:
        """Every row decodes one token."""
        return not (self.total_drafts or self.total_catch_up or self.num_chunks)


class DraftLimits(NamedTuple):
    most: RowTokens  # as many drafts as each may ever have
    all_catch_up: bool  # every row may plan catch-up wherever it may draft


class DecodeBatch(msgspec.Struct, eq=False):
    """Rows that decode, in ascending order of slots, and what is constant while they do.

    To work this out costs more than to plan a step with it: `SchedulerState.decode_batch` keeps the
    one of all decoding rows until their set changes, and nothing else is kept between steps."""

    slots: np.ndarray
    index: np.ndarray  # the same as intp: as an index, int32 costs a conversion
    rows: slice | np.ndarray  # selects them in the table
    owners: list[Sequence]
    generations: np.ndarray
    wants_logits: np.ndarray  # all of them do
    plain: RowTokens  # one token each
    may_draft: bool  # somebody may
    itl_target_s: float | None = None  # the least of its rows
    limits: DraftLimits | None = None  # None: nobody has asked
    tokens_until_end: int = 0  # at least so many before any row comes near its end

    @classmethod
    def of(
        cls,
        table: SlotTable,
        owners: list[Sequence],
        slots: list[int],
        itl_target_s: float | None = None,
    ) -> DecodeBatch:
        index = np.array(slots, dtype=np.intp)
        count = len(slots)
        adjacent = count > 0 and slots[-1] - slots[0] == count - 1
        # As a slice where it can be: numpy is several times faster.
        rows = slice(slots[0], slots[0] + count) if adjacent else index
        zeros = table.zeros[:count]
        return cls(
            slots=index.astype(np.int32),
            index=index,
            rows=rows,
            owners=owners,
            generations=table.generation[index],
            wants_logits=table.trues[:count],
            plain=RowTokens(zeros, table.ones[:count], zeros, 0),
            may_draft=bool(np.count_nonzero(table.max_lookahead[rows])),
            itl_target_s=itl_target_s,
        )

    def draft_limits(self, table: SlotTable) -> DraftLimits:
        if self.limits is None:
            most = RowTokens.of(table.max_lookahead[self.rows].copy(), self.plain.num_drafts, 0)
            behind = table.catch_up_end[self.rows] < table.lookahead_end[self.rows]
            self.limits = DraftLimits(most, not np.count_nonzero(behind))
        return self.limits

    def near_end(self, table: SlotTable, tokens: int) -> bool:
        """Whether a row comes near its end within so many tokens. Makes the bound sharp if need
        be."""
        if self.tokens_until_end < tokens:
            until_end = table.lookahead_end[self.rows] - table.num_tokens[self.rows]
            self.tokens_until_end = min(until_end.tolist(), default=0)
        return self.tokens_until_end < tokens

    def check(self, table: SlotTable, decoding: list[Sequence]) -> None:
        """Whether it is still of all rows that decode; raises AssertionError."""
        assert len(decoding) == len(self.owners), "the set of decoding rows has changed"
        assert all(a is b for a, b in zip(decoding, self.owners, strict=True))
        assert (self.generations == table.generation[self.index]).all()
        until_end = table.lookahead_end[self.index] - table.num_tokens[self.index]
        assert (until_end >= self.tokens_until_end).all(), "nearer to its end than is thought"


class Flight(msgspec.Struct, eq=False):
    """A plan that has not been committed."""

    plan: StepPlan
    rows: slice | np.ndarray  # selects the plan's slots in the table
    owners: list[Sequence]  # by row
    tokens: RowTokens
    overlaps: bool  # it was made while another was in flight
    itl_target_s: float | None = None  # of its decoding rows
    void_slots: list[int] = []  # ended since: their results are dropped
    held_slots: list[int] = []  # of these, the ones to free when this plan commits
