"""The changes that the next plan reports to the executor."""

from __future__ import annotations

import numpy as np

from cbatch.core.scheduler.plan import Deltas, NewSequence

_NONE = np.zeros(0, dtype=np.int32)
_NOTHING_APPENDED = np.zeros((3, 0), dtype=np.int32)
NO_DELTAS = Deltas(False, _NONE, _NONE, (), _NONE, _NONE, _NONE)


class PendingDeltas:
    """Changes since the previous plan. The first plan is a full snapshot."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all changes: the next plan is a full snapshot."""
        self._reset = True
        self.released: list[int] = []  # slots
        self.new_sequences: list[NewSequence] = []
        self._appended = _NOTHING_APPENDED  # slots, indices, blocks
        self.state_pages: list[np.ndarray] = []  # int32 [3, N]: slots, boundaries, pages

    def append(self, slots: np.ndarray, indices: np.ndarray, blocks: np.ndarray) -> None:
        """Note the blocks that a plan appends, all at once."""
        self._appended = np.empty((3, len(slots)), dtype=np.int32)
        self._appended[0], self._appended[1], self._appended[2] = slots, indices, blocks

    def take(self, to_zero: np.ndarray) -> Deltas:
        """Return the changes since the last call; `to_zero` are the blocks to zero."""
        appended, pages = self._appended, self.state_pages
        no_blocks = appended is _NOTHING_APPENDED and not (pages or len(to_zero))
        if no_blocks and not (self.new_sequences or self.released or self._reset):
            return NO_DELTAS
        self._appended = _NOTHING_APPENDED
        deltas = Deltas(
            reset=self._reset,
            released=np.asarray(self.released, dtype=np.int32) if self.released else _NONE,
            zeroed_blocks=to_zero,
            new_sequences=tuple(self.new_sequences),
            append_slots=appended[0],
            append_indices=appended[1],
            append_blocks=appended[2],
            state_pages=np.concatenate(pages, axis=1) if pages else _NOTHING_APPENDED,
        )
        self._reset = False
        self.released, self.new_sequences, self.state_pages = [], [], []
        return deltas
