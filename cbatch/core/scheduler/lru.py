"""The order in which unreferenced cached blocks are evicted."""

from __future__ import annotations

import numpy as np


class ReleaseOrder:
    """Queue of blocks, least recently appended first, with array operations on many blocks at once.

    Removal leaves gaps in the queue; they are closed when its end is reached."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks, dtype=np.intp)
        self._occupied = np.zeros(2 * num_blocks, dtype=np.bool_)  # by position; False: a gap
        self._positions = np.zeros(num_blocks, dtype=np.intp)  # by block
        self._head = self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, blocks: np.ndarray) -> None:
        """Append blocks that are not in the queue."""
        if self._tail + len(blocks) > len(self._queue):
            self._compact()
        first, self._tail = self._tail, self._tail + len(blocks)
        self._queue[first : self._tail] = blocks
        self._occupied[first : self._tail] = True
        self._positions[blocks] = np.arange(first, self._tail)
        self._count += len(blocks)

    def remove(self, blocks: np.ndarray) -> None:
        """Remove blocks from any position of the queue."""
        self._occupied[self._positions[blocks]] = False
        self._count -= len(blocks)

    def take(self, count: int) -> np.ndarray:
        """Remove and return the first `count` blocks; the queue has as many."""
        num_blocks, end = 0, self._head
        while num_blocks < count:
            begin, end = end, end + count - num_blocks
            # Counted in bytes, because numpy takes several times as long for so short an array.
            num_blocks += self._occupied[begin:end].tobytes().count(True)
        positions = slice(self._head, end)
        blocks = self._queue[positions][self._occupied[positions]]
        self._occupied[positions] = False
        self._head = end
        self._count -= count
        return blocks

    def check(self) -> np.ndarray:
        """Return all blocks in order. Raises `AssertionError` if an invariant is violated."""
        positions = self._occupied.nonzero()[0]
        blocks = self._queue[positions]
        assert len(positions) == self._count, f"{len(positions)} blocks, {self._count} are counted"
        assert (self._positions[blocks] == positions).all(), (
            "a block is in the wrong place, or in two"
        )
        if len(positions):
            assert self._head <= positions[0] and positions[-1] < self._tail, "outside of the queue"
        return blocks

    def _compact(self) -> None:
        blocks = self._queue[self._occupied]
        self._head, self._tail = 0, len(blocks)
        self._queue[: self._tail] = blocks
        self._occupied[:] = False
        self._occupied[: self._tail] = True
        self._positions[blocks] = np.arange(self._tail)
