"""The slot table: the state of every running sequence as a struct of arrays, one row a slot."""

from __future__ import annotations

import heapq

import numpy as np

_INITIAL_WIDTH_TOKENS = 256
# A Python number costs an array operation a conversion.
ZERO, ONE = np.array(0, dtype=np.int32), np.array(1, dtype=np.int32)


def advance(column: np.ndarray, rows: slice | np.ndarray, by: np.ndarray | int) -> None:
    """`column[rows] += by`, without the second copy that numpy makes of a slice."""
    if isinstance(rows, slice):
        view = column[rows]
        view += by
    else:
        column[rows] += by


class SlotTable:
    """Row i belongs to the sequence in slot i. All counts are in tokens, of committed steps only:
    what plans in flight will add is read off those plans.

    A decoding sequence has one known token that is not in KV, so its step changes `num_tokens` and
    nothing else here; the counts of KV positions are derived.
    """

    def __init__(self, max_slots: int, max_blocks_per_sequence: int) -> None:
        def column(dtype: type[np.generic] = np.int32) -> np.ndarray:
            return np.zeros(max_slots, dtype=dtype)

        self.generation = column()
        self.num_tokens = column()  # known: prompt and output
        # Of these not in KV: 1 while it decodes, more while it prefills.
        self.num_uncomputed_tokens = column()
        self.draft_kv = column()  # positions in the draft's KV: steps without drafts leave it alone
        self.max_total = column()  # prompt + max_tokens, cut to what fits
        self.max_lookahead = column()
        self.lookahead_end = column()  # no draft beyond this many known tokens
        self.catch_up_end = column()  # nor is catch-up planned beyond this many
        self.capacity = column()  # positions that its blocks can hold
        self.reserved_tokens = column()  # capacity since admission, never given back as a tail
        self.num_cached_tokens = column()  # leading positions whose blocks are open to others
        # Constants, of which plans share the first so many.
        self.zeros, self.ones = column(), column() + ONE
        self.trues = np.ones(max_slots, dtype=np.bool_)
        self.blocks = np.zeros((max_slots, max_blocks_per_sequence), dtype=np.intp)
        self._free_slots = list(range(max_slots))  # a heap
        self._set_tokens(np.zeros((max_slots, _INITIAL_WIDTH_TOKENS), dtype=np.int32))

    def kv_len(self, slot: int) -> int:
        """Valid target positions."""
        return int(self.num_tokens[slot]) - int(self.num_uncomputed_tokens[slot])

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def take_slot(self) -> int:
        return heapq.heappop(self._free_slots)

    def free_slot(self, slot: int) -> None:
        """The lowest free slot is taken next, which keeps running rows together."""
        heapq.heappush(self._free_slots, slot)

    def ensure_width(self, tokens: int) -> None:
        """Make room for sequences of that many tokens; the width doubles, so it rarely grows."""
        width = self.tokens.shape[1]
        if tokens <= width:
            return
        while width < tokens:
            width *= 2
        wider = np.zeros((self.tokens.shape[0], width), dtype=np.int32)
        wider[:, : self.tokens.shape[1]] = self.tokens
        self._set_tokens(wider)

    def token_row(self, slot: int) -> np.ndarray:
        """The known tokens of a sequence, a view."""
        return self.tokens[slot, : self.num_tokens[slot]]

    def _set_tokens(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.flat_tokens = tokens.reshape(-1)  # the same memory, and where each row starts in it
        self.row_start = np.arange(0, tokens.size, tokens.shape[1])
