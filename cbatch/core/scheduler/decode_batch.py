"""The rows of a step: decoding rows, the tokens that each row computes, and steps in flight."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.slot_table import ONE, SlotTable


class RowTokens(msgspec.Struct, frozen=True, eq=False):
    """Number of tokens that each row computes, int32 [rows], and their sums. Never changed, so that
    equal steps can share it."""

    num_drafts: np.ndarray
    query_lens: np.ndarray  # 1 + num_drafts, or the length of a chunk
    catch_up: np.ndarray
    total_drafts: int
    total_catch_up: int = 0
    all_draft: bool = False
    num_chunks: int = 0  # rows that prefill

    @classmethod
    def of(cls, num_drafts: np.ndarray, catch_up: np.ndarray, total_catch_up: int) -> RowTokens:
        """Return the tokens of decoding rows."""
        total = int(np.add.reduce(num_drafts))
        all_draft = bool(np.count_nonzero(num_drafts) == len(num_drafts))
        return cls(num_drafts, num_drafts + ONE, catch_up, total, total_catch_up, all_draft)

    def with_catch_up(self, catch_up: np.ndarray, total: int) -> RowTokens:
        """Return the same with other catch-up tokens and their sum."""
        drafts = self.num_drafts, self.query_lens, catch_up, self.total_drafts
        return RowTokens(*drafts, total, self.all_draft)

    @property
    def plain(self) -> bool:
        """True if every row decodes one token."""
        return not (self.total_drafts or self.total_catch_up or self.num_chunks)


class DraftLimits(NamedTuple):
    """Limits of drafting that stay the same while the set of decoding rows does."""

    max_tokens: RowTokens  # each row drafts as much as its request allows
    all_catch_up: bool  # every row may plan catch-up wherever it may draft


class DecodeBatch(msgspec.Struct, eq=False):
    """Decoding rows in ascending order of slots, and what is constant while they decode.

    This takes longer to compute than a plan. So `SchedulerState.decode_batch` keeps the batch of
    all decoding rows until their set changes."""

    slots: np.ndarray  # int32
    index: np.ndarray  # the slots as intp: an int32 index costs a conversion
    rows: slice | np.ndarray  # selects the slots in a column of the table
    owners: list[Sequence]
    generations: np.ndarray
    wants_logits: np.ndarray  # all true
    plain: RowTokens  # one token per row
    may_draft: bool  # any row may draft
    itl_target_s: float | None = None  # the shortest of its rows
    limits: DraftLimits | None = None  # None: not computed yet
    tokens_until_end: int = 0  # lower bound of each row's tokens until its `lookahead_end`

    @classmethod
    def of(
        cls,
        table: SlotTable,
        owners: list[Sequence],
        slots: list[int],
        itl_target_s: float | None = None,
    ) -> DecodeBatch:
        """Return the batch of rows in these slots; `owners` are their sequences."""
        index = np.array(slots, dtype=np.intp)
        count = len(slots)
        adjacent = count > 0 and slots[-1] - slots[0] == count - 1
        # numpy is several times faster with a slice than with an index array.
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
        """Return the limits, computed at the first call."""
        if self.limits is None:
            tokens = RowTokens.of(table.max_lookahead[self.rows].copy(), self.plain.num_drafts, 0)
            ends_earlier = table.catch_up_end[self.rows] < table.lookahead_end[self.rows]
            self.limits = DraftLimits(tokens, not np.count_nonzero(ends_earlier))
        return self.limits

    def near_end(self, table: SlotTable, tokens: int) -> bool:
        """Return whether a row may reach its end within `tokens` tokens. Computes the bound
        `tokens_until_end` again if that does not decide."""
        if self.tokens_until_end < tokens:
            until_end = table.lookahead_end[self.rows] - table.num_tokens[self.rows]
            self.tokens_until_end = min(until_end.tolist(), default=0)
        return self.tokens_until_end < tokens

    def check(self, table: SlotTable, decoding: list[Sequence]) -> None:
        """Raise `AssertionError` unless this is the batch of the `decoding` sequences."""
        assert len(decoding) == len(self.owners), "the set of decoding rows has changed"
        assert all(a is b for a, b in zip(decoding, self.owners, strict=True))
        assert (self.generations == table.generation[self.index]).all()
        until_end = table.lookahead_end[self.index] - table.num_tokens[self.index]
        assert (until_end >= self.tokens_until_end).all(), (
            "has fewer remaining tokens than recorded"
        )


class InFlightStep(msgspec.Struct, eq=False):
    """A plan that has not been committed."""

    plan: StepPlan
    rows: slice | np.ndarray  # selects the plan's slots in a column of the table
    owners: list[Sequence]  # by row
    tokens: RowTokens
    overlaps: bool  # another plan was in flight when this one was made
    itl_target_s: float | None = None  # the shortest of its decoding rows
    cancelled_slots: list[int] = []  # left since it was planned: their results are dropped
    slots_to_free: list[int] = []  # those of `cancelled_slots` to free when this plan commits
