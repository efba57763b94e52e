"""Pools of items that are free, referenced, or cached: the base of blocks and state pages.

An item is in exactly one of three states: free, referenced by one or more sequences, or cached and
unreferenced (kept for a future prefix hit, evicted least recently used first):
`free + referenced + cached_unreferenced == total`.
"""

from __future__ import annotations

import numpy as np

# Constants as arrays, because numpy converts a Python number in each operation.
ZERO, ONE = np.array(0, dtype=np.int32), np.array(1, dtype=np.int32)


class EvictionQueue:
    """Unreferenced cached items in the order of eviction, least recently appended first, with
    operations on many items at once. Removal leaves gaps until the array is full."""

    def __init__(self, size: int) -> None:
        self._queue = np.zeros(2 * size, dtype=np.intp)
        self._occupied = np.zeros(2 * size, dtype=np.bool_)  # by position; False: a gap
        self._positions = np.zeros(size, dtype=np.intp)  # by item
        self._head = self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, items: np.ndarray) -> None:
        """Append items that are not in the queue."""
        if self._tail + len(items) > len(self._queue):
            self._compact()
        first, self._tail = self._tail, self._tail + len(items)
        self._queue[first : self._tail] = items
        self._occupied[first : self._tail] = True
        self._positions[items] = np.arange(first, self._tail)
        self._count += len(items)

    def remove(self, items: np.ndarray) -> None:
        """Remove items from any position of the queue."""
        self._occupied[self._positions[items]] = False
        self._count -= len(items)

    def take(self, count: int) -> np.ndarray:
        """Remove and return the first `count` items. The queue must not have fewer."""
        num_items, end = 0, self._head
        while num_items < count:
            begin, end = end, end + count - num_items
            # Counting bytes is several times as fast as numpy on an array this short.
            num_items += self._occupied[begin:end].tobytes().count(True)
        positions = slice(self._head, end)
        items = self._queue[positions][self._occupied[positions]]
        self._occupied[positions] = False
        self._head = end
        self._count -= count
        return items

    def check(self) -> np.ndarray:
        """Return all items in order. Raises `AssertionError` if an invariant is violated."""
        positions = self._occupied.nonzero()[0]
        items = self._queue[positions]
        assert len(positions) == self._count, f"{len(positions)} items, {self._count} are counted"
        assert (self._positions[items] == positions).all(), (
            "an item is in the wrong place, or in two"
        )
        if len(positions):
            assert self._head <= positions[0] and positions[-1] < self._tail, "outside of the queue"
        return items

    def _compact(self) -> None:
        items = self._queue[self._occupied]
        self._head, self._tail = 0, len(items)
        self._queue[: self._tail] = items
        self._occupied[:] = False
        self._occupied[: self._tail] = True
        self._positions[items] = np.arange(self._tail)


class CachingPool:
    """Items 0 to `size` - 1 with reference counts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ref_counts = np.zeros(size, dtype=np.int32)
        # A stack; reversed so that a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(size - 1, -1, -1))
        self._cached = EvictionQueue(size)  # cached and unreferenced
        self._ready = np.zeros(size, dtype=np.bool_)  # by item: whether the cache has it

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Return the number of items that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> np.ndarray:
        """Return `count` items with one reference each, intp [count]: free items, then the least
        recently used cached ones. The caller has checked `num_available`. intp is numpy's index
        type; other integers cost a conversion at each use."""
        free = self._free
        popped = free[: -count - 1 : -1]
        if popped:
            del free[len(free) - len(popped) :]
            items = np.array(popped, dtype=np.intp)
            if len(popped) < count:
                items = np.concatenate([items, self._evict(count - len(popped))])
        else:
            items = self._evict(count)
        self.ref_counts[items] = ONE
        return items

    def acquire(self, items: list[int]) -> None:
        """Add a reference to each item of a cache hit."""
        if not items:
            return
        hits = np.array(items)
        counts = self.ref_counts[hits]
        self._cached.remove(hits[counts == 0])
        self.ref_counts[hits] = counts + 1

    def release(self, items: np.ndarray) -> None:
        """Remove a reference from each item. The first enters the LRU order first."""
        counts = self.ref_counts[items] - ONE
        self.ref_counts[items] = counts
        unreferenced = items[counts == ZERO]
        ready = self._ready[unreferenced]
        cached, freed = unreferenced[ready], unreferenced[~ready]
        if len(cached):
            self._cached.append(cached)
        if len(freed):
            self._forget(freed)
            self._free += freed.tolist()

    def check(self) -> None:
        """Raise `AssertionError` if an invariant of the pool is violated."""
        free = self._free
        referenced = int(np.count_nonzero(self.ref_counts))
        assert (self.ref_counts >= 0).all(), "negative reference count"
        assert len(free) + referenced + len(self._cached) == self.size, (
            f"{len(free)} free + {referenced} referenced + {len(self._cached)} cached "
            f"!= {self.size}"
        )
        assert len(np.unique(free)) == len(free), "an item is free twice"
        assert (self.ref_counts[free] == 0).all(), "a free item is referenced"
        assert not self._ready[free].any(), "a free item is cached"
        cached = self._cached.check()
        assert (self.ref_counts[cached] == 0).all() and self._ready[cached].all()

    def _forget(self, items: np.ndarray) -> None:
        """Remove items from the cache."""
        raise NotImplementedError

    def _evict(self, count: int) -> np.ndarray:
        evicted = self._cached.take(count)
        self._forget(evicted)
        return evicted
