"""The running sequences: their state as a struct of arrays, a row per slot, and views of it.

`SlotTable` has the state. `DecodeBatch` selects the decoding rows. `RowTokens` has the numbers of
tokens that rows compute in a step. `InFlightStep` is a plan whose result is pending.
"""

from __future__ import annotations

import heapq

import msgspec
import numpy as np

from cbatch.core.scheduler.caching_pool import ONE
from cbatch.core.scheduler.plan import StepPlan
from cbatch.core.scheduler.sequence import Sequence

_INITIAL_WIDTH_TOKENS = 256


class SlotTable:
    """State by slot. All counts are in tokens, and exclude plans in flight.

    A decoding sequence has exactly one known token that is not in KV. So a decode step changes only
    the column `num_tokens`; the number of KV positions is derived.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_sequence: int) -> None:
        def column(dtype: type[np.generic] = np.int32) -> np.ndarray:
            return np.zeros(max_num_seqs, dtype=dtype)

        self.generation = column()
        self.num_tokens = column()  # known tokens: prompt and output
        # Known tokens that are not in KV: 1 while it decodes, more while it prefills.
        self.num_uncomputed_tokens = column()
        self.draft_kv = column()  # valid positions in the draft model's KV
        self.max_total = column()  # prompt + max_tokens, cut to context and pool
        self.max_lookahead = column()  # most drafts in a step
        self.lookahead_end = column()  # most known tokens and drafts together
        self.catch_up_end = column()  # most known tokens at which catch-up is planned
        self.capacity = column()  # positions in its blocks
        self.reserved_tokens = column()  # capacity at admission, kept until the sequence leaves
        self.num_cached_tokens = column()  # leading positions in ready blocks of the prefix cache
        # Constants; plans use slices of them.
        self.zeros, self.ones = column(), column() + ONE
        self.trues = np.ones(max_num_seqs, dtype=np.bool_)
        self.blocks = np.zeros((max_num_seqs, max_blocks_per_sequence), dtype=np.intp)
        self._free_slots = list(range(max_num_seqs))  # a heap
        self._set_tokens(np.zeros((max_num_seqs, _INITIAL_WIDTH_TOKENS), dtype=np.int32))

    def kv_len(self, slot: int) -> int:
        """Return the number of valid positions in the target's KV."""
        return int(self.num_tokens[slot]) - int(self.num_uncomputed_tokens[slot])

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def take_slot(self) -> int:
        return heapq.heappop(self._free_slots)

    def free_slot(self, slot: int) -> None:
        """Free a slot. The lowest free slot is taken next, so that running rows are adjacent."""
        heapq.heappush(self._free_slots, slot)

    def ensure_width(self, tokens: int) -> None:
        """Make rows at least `tokens` tokens long. The length doubles, so that it rarely grows."""
        width = self.tokens.shape[1]
        if tokens <= width:
            return
        while width < tokens:
            width *= 2
        wider = np.zeros((self.tokens.shape[0], width), dtype=np.int32)
        wider[:, : self.tokens.shape[1]] = self.tokens
        self._set_tokens(wider)

    def token_row(self, slot: int) -> np.ndarray:
        """Return the known tokens of a sequence, as a view."""
        return self.tokens[slot, : self.num_tokens[slot]]

    def _set_tokens(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.flat_tokens = tokens.reshape(-1)  # a view
        self.row_start = np.arange(0, tokens.size, tokens.shape[1])  # by slot, in `flat_tokens`


class RowTokens(msgspec.Struct, frozen=True, eq=False):
    """Numbers of tokens that each row computes, int32 [rows], and their sums. Immutable, so that
    steps can share them."""

    num_drafts: np.ndarray
    query_lens: np.ndarray  # 1 + num_drafts, or the length of a chunk
    catch_up: np.ndarray
    total_drafts: int
    total_catch_up: int = 0
    all_draft: bool = False
    num_chunks: int = 0  # rows that prefill

    @classmethod
    def of(cls, num_drafts: np.ndarray, catch_up: np.ndarray, total_catch_up: int) -> RowTokens:
        """Return the tokens of decoding rows with these drafts and catch-up tokens."""
        total = int(np.add.reduce(num_drafts))
        all_draft = bool(np.count_nonzero(num_drafts) == len(num_drafts))
        return cls(num_drafts, num_drafts + ONE, catch_up, total, total_catch_up, all_draft)

    def with_catch_up(self, catch_up: np.ndarray, total: int) -> RowTokens:
        """Return the same drafts with other catch-up tokens, whose sum is `total`."""
        drafts = self.num_drafts, self.query_lens, catch_up, self.total_drafts
        return RowTokens(*drafts, total, self.all_draft)

    @property
    def plain(self) -> bool:
        """True if every row decodes one token."""
        return not (self.total_drafts or self.total_catch_up or self.num_chunks)


class DecodeBatch:
    """Decoding rows in ascending order of slots, and what is constant while they decode.

    A batch takes longer to compute than a plan. So `SchedulerState.decode_batch` keeps the batch of
    all decoding rows until their set changes."""

    def __init__(
        self, table: SlotTable, owners: list[Sequence], slots: list[int], itl_target_s: float | None
    ) -> None:
        """`owners` are the sequences in these slots, `itl_target_s` is their shortest target."""
        count = len(slots)
        self.index = np.array(slots, dtype=np.intp)  # an int32 index costs a conversion
        self.slots = self.index.astype(np.int32)
        # Selects the slots in a column of the table. numpy is several times faster with a slice.
        adjacent = count > 0 and slots[-1] - slots[0] == count - 1
        self.rows = slice(slots[0], slots[0] + count) if adjacent else self.index
        self.owners, self.itl_target_s = owners, itl_target_s
        self.generations = table.generation[self.index]
        self.wants_logits = table.trues[:count]
        zeros = table.zeros[:count]
        self.plain = RowTokens(zeros, table.ones[:count], zeros, 0)  # one token per row
        self.may_draft = bool(np.count_nonzero(table.max_lookahead[self.rows]))  # if any row may
        # Most drafts that each row's request allows, and whether every row may catch up for as long
        # as it may draft.
        self.max_drafts, self.all_catch_up = self.plain, True
        if self.may_draft:
            self.max_drafts = RowTokens.of(table.max_lookahead[self.rows].copy(), zeros, 0)
            ends_earlier = table.catch_up_end[self.rows] < table.lookahead_end[self.rows]
            self.all_catch_up = not np.count_nonzero(ends_earlier)
        self.tokens_until_end = 0  # lower bound of each row's tokens until its `lookahead_end`

    def may_end(self, table: SlotTable, max_emitted: int) -> bool:
        """Return whether a row may reach its last token in the step that commits, if each row emits
        at most `max_emitted` tokens. Call it once per commit: it lowers `tokens_until_end`, and
        recomputes that bound when it is too low."""
        if self.tokens_until_end < max_emitted:
            until_end = table.lookahead_end[self.rows] - table.num_tokens[self.rows]
            self.tokens_until_end = min(until_end.tolist(), default=0)
        self.tokens_until_end -= max_emitted
        return self.tokens_until_end < 0


class InFlightStep(msgspec.Struct, eq=False):
    """A plan that has not been committed."""

    plan: StepPlan
    rows: slice | np.ndarray  # selects the plan's slots in a column of the table
    owners: list[Sequence]  # by row
    tokens: RowTokens
    overlaps: bool  # another plan was in flight when this one was made
    itl_target_s: float | None = None  # shortest target of its decoding rows
    cancelled_slots: list[int] = []  # slots left since it was planned: their results are dropped
    slots_to_free: list[int] = []  # part of `cancelled_slots`, to free when this plan commits


def runs(slots: np.ndarray, first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return slots and indices: `counts[i]` consecutive indices from `first[i]` in `slots[i]`."""
    if np.add.reduce(counts) == len(counts):  # a shortcut for the usual case: ten times as fast
        return slots, first
    rows, before = slots.repeat(counts), counts.cumsum(dtype=np.int32) - counts
    return rows, (first - before).repeat(counts) + np.arange(len(rows), dtype=np.int32)
