"""The slot table: the state of every running sequence as a struct of arrays, one row a slot."""

from __future__ import annotations

import numpy as np

_INITIAL_WIDTH_TOKENS = 256


def advance(column: np.ndarray, rows: slice | np.ndarray, by: np.ndarray | int) -> None:
    """`column[rows] += by`, without the second copy that numpy makes of a slice."""
    if isinstance(rows, slice):
        view = column[rows]
        view += by
    else:
        column[rows] += by


class SlotTable:
    """Row i belongs to the sequence in slot i. All token counts are absolute.

    With nothing in flight `kv_high == kv_len` and `known == num_tokens`. While plans are in flight
    these two include them: `known` as the least, `kv_high` as the most that the sequence can have
    once they commit.
    """

    def __init__(self, max_slots: int, max_blocks_per_sequence: int) -> None:
        def column(dtype: type[np.generic] = np.int32) -> np.ndarray:
            return np.zeros(max_slots, dtype=dtype)

        self.generation = column()
        self.num_tokens = column()  # prompt and committed output
        self.kv_len = column()  # valid target positions
        self.known = column()
        self.kv_high = column()
        self.draft_kv_len = column()  # valid draft positions, <= kv_len
        self.draft_mark_at = column()  # draft_kv_len that completes the next block
        self.publish_at = column()  # kv_len that completes the next block
        self.max_total = column()  # prompt + max_tokens, cut to what fits
        self.max_lookahead = column()
        self.lookahead_end = column()  # no draft beyond this many known tokens
        self.num_blocks = column()
        self.floor_blocks = column()  # reserved at admission, never given back as a tail
        self.estimate = np.zeros((2, max_slots), dtype=np.float64)  # the estimator's N and D
        self.blocks = np.zeros((max_slots, max_blocks_per_sequence), dtype=np.int32)
        self.tokens = np.zeros((max_slots, _INITIAL_WIDTH_TOKENS), dtype=np.int32)
        self._free_slots = list(range(max_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def free_slot(self, slot: int) -> None:
        """The lowest free slot is taken next, which keeps running rows together."""
        self._free_slots.append(slot)
        self._free_slots.sort(reverse=True)

    def ensure_width(self, tokens: int) -> None:
        """Make room for sequences of that many tokens; the width doubles, so it rarely grows."""
        width = self.tokens.shape[1]
        if tokens <= width:
            return
        while width < tokens:
            width *= 2
        wider = np.zeros((self.tokens.shape[0], width), dtype=np.int32)
        wider[:, : self.tokens.shape[1]] = self.tokens
        self.tokens = wider

    def block_row(self, slot: int) -> np.ndarray:
        """The blocks of a sequence by absolute index, a view."""
        return self.blocks[slot, : self.num_blocks[slot]]

    def token_row(self, slot: int) -> np.ndarray:
        """The known tokens of a sequence, a view."""
        return self.tokens[slot, : self.num_tokens[slot]]
