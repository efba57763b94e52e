"""Which of the blocks that nobody refers to was let go first."""

from __future__ import annotations

import numpy as np


class ReleaseOrder:
    """Some of `num_blocks` blocks, least recently appended first. What it does to many costs little
    more than what it does to one: they stand in a queue with gaps, which are closed where it ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks, dtype=np.intp)
        self._stands = np.zeros(2 * num_blocks, dtype=np.bool_)  # by place; the others are gaps
        self._place = np.zeros(num_blocks, dtype=np.intp)  # by block
        self._head = self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, blocks: np.ndarray) -> None:
        """Let go now, one after the other; none of them is in the queue."""
        if self._tail + len(blocks) > len(self._queue):
            self._close_gaps()
        first, self._tail = self._tail, self._tail + len(blocks)
        self._queue[first : self._tail] = blocks
        self._stands[first : self._tail] = True
        self._place[blocks] = np.arange(first, self._tail)
        self._count += len(blocks)

    def remove(self, blocks: np.ndarray) -> None:
        """From wherever they stand."""
        self._stands[self._place[blocks]] = False
        self._count -= len(blocks)

    def take(self, count: int) -> np.ndarray:
        """The first `count`, which is at most all there are."""
        found, end = 0, self._head
        while found < count:
            begin, end = end, end + count - found
            # As bytes: they are few, and numpy would take several times as long.
            found += self._stands[begin:end].tobytes().count(True)
        places = slice(self._head, end)
        blocks = self._queue[places][self._stands[places]]
        self._stands[places] = False
        self._head = end
        self._count -= count
        return blocks

    def check(self) -> np.ndarray:
        """Every invariant; raises AssertionError. Returns what it has, in order."""
        places = self._stands.nonzero()[0]
        blocks = self._queue[places]
        assert len(places) == self._count, f"{len(places)} stand there, {self._count} are counted"
        assert (self._place[blocks] == places).all(), "a block stands somewhere else, or twice"
        if len(places):
            assert self._head <= places[0] and places[-1] < self._tail, "outside of the queue"
        return blocks

    def _close_gaps(self) -> None:
        blocks = self._queue[self._stands]
        self._head, self._tail = 0, len(blocks)
        self._queue[: self._tail] = blocks
        self._stands[:] = False
        self._stands[: self._tail] = True
        self._place[blocks] = np.arange(self._tail)
