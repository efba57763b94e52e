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
        self._reset = True
        self.released: list[int] = []  # slots
        self.new_sequences: list[NewSequence] = []
        self._appended = _NOTHING_APPENDED  # slots, indices, blocks

    def append(self, slots: np.ndarray, indices: np.ndarray, blocks: np.ndarray) -> None:
        """Note the blocks that a plan appends, all at once."""
        self._appended = np.empty((3, len(slots)), dtype=np.int32)
        self._appended[0], self._appended[1], self._appended[2] = slots, indices, blocks

    def take(self, to_zero: np.ndarray, state_pages: np.ndarray | None) -> Deltas:
        """Return the changes since the last call, with the blocks to zero and new state pages."""
        appended = self._appended
        no_blocks = appended is _NOTHING_APPENDED and not len(to_zero) and state_pages is None
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
            state_pages=_NOTHING_APPENDED if state_pages is None else state_pages,
        )
        self._reset = False
        self.released, self.new_sequences = [], []
        return deltas
