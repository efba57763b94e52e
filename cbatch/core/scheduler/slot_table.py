"""The slot table: the state of every running sequence as a struct of arrays, a row per slot."""

from __future__ import annotations

import heapq

import numpy as np

_INITIAL_WIDTH_TOKENS = 256
# As arrays, because numpy must convert a Python number in each operation.
ZERO, ONE = np.array(0, dtype=np.int32), np.array(1, dtype=np.int32)


def advance(column: np.ndarray, rows: slice | np.ndarray, by: np.ndarray | int) -> None:
    """Do `column[rows] += by`, without the copy that numpy makes of a slice."""
    if isinstance(rows, slice):
        view = column[rows]
        view += by
    else:
        column[rows] += by


class SlotTable:
    """State by slot. All counts are in tokens, and exclude plans in flight.

    A decoding sequence has exactly one known token that is not in KV. So its step changes
    `num_tokens` and no other column; the number of KV positions is derived.
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
        self.max_lookahead = column()  # most drafts a step
        self.lookahead_end = column()  # most known tokens and drafts together
        self.catch_up_end = column()  # most known tokens at which catch-up is planned
        self.capacity = column()  # positions in its blocks
        self.reserved_tokens = column()  # capacity at admission, which is not given back before
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
        self.row_start = np.arange(0, tokens.size, tokens.shape[1])  # of each slot, in the view
