"""Blocks of KV memory: reference counts, and a prefix cache that shares them without copies.

A block is in exactly one of three states: free, referenced (by one or more sequences), or cached
and unreferenced (kept for a future prefix hit, evicted least recently used first):
`free + referenced + cached_unreferenced == total`.

The prefix cache is a trie stored as one dictionary. A node's key is (uid of the parent node, the
bytes of the block's own token ids), so a hit compares the tokens themselves and a chain of hits
compares the whole prefix; uids are never used twice. A node is *promised* when a running sequence
is about to compute it, and *ready* once its KV is verified and complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

import msgspec
import numpy as np

ROOT_UID = 0
_NONE = np.zeros(0, dtype=np.int32)
Key = tuple[int, bytes]


class Match(msgspec.Struct, frozen=True):
    """The longest ready prefix. `uid` names its last node; `promised` says that the very next block
    is being computed by a running sequence, so waiting for it beats computing it twice."""

    blocks: list[int]
    uid: int
    promised: bool


class BlockPool:
    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size_tokens
        self.ref_counts = np.zeros(num_blocks, dtype=np.int32)
        # True where the block's draft-model KV is complete too.
        self._draft_valid = bytearray(num_blocks)
        self.draft_valid = np.frombuffer(self._draft_valid, dtype=np.bool_)  # the same memory
        # A stack; reversed so that a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(num_blocks - 1, -1, -1))
        # Cached and unreferenced, oldest first. A plain dict would search for its first entry past
        # all those taken out before it.
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._index: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_blocks  # by block: its node, if it has one
        self._uids = [ROOT_UID] * num_blocks
        self._ready = bytearray(num_blocks)
        self._next_uid = ROOT_UID + 1
        self._name_type = f"V{4 * block_size_tokens}"  # as bytes, the int32 of a block
        self._dirty: dict[int, None] = {}  # held non-finite values: zero before the next use
        self._to_zero: list[int] = []

    # ---- counts -------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._lru)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._lru)

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def occupancy(self, most_cells: int) -> tuple[int, np.ndarray, np.ndarray]:
        """A map of at most so many cells: blocks a cell (the last may have fewer), and of each how
        many are referenced and how many cached and unreferenced, intp [cells]."""
        size = -(-self.num_blocks // most_cells)
        starts = np.arange(0, self.num_blocks, size)
        referenced = self.ref_counts > 0
        cached = np.frombuffer(self._ready, dtype=np.bool_) & ~referenced
        used = np.add.reduceat(referenced, starts, dtype=np.intp)
        return size, used, np.add.reduceat(cached, starts, dtype=np.intp)

    # ---- allocation ---------------------------------------------------------------------------

    def allocate(self, count: int) -> np.ndarray:
        """`count` blocks with one reference each: free ones, then the oldest cached; so two calls
        hand out what one for both would. The caller has checked `num_available`. They are intp,
        numpy's own index type: with any other, each use as an index costs a conversion."""
        free = self._free
        if count > len(free):
            self._evict(count - len(free))
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        blocks = np.array(taken, dtype=np.intp)
        self.ref_counts[blocks] = 1
        if self._dirty:
            for block in taken:
                if block in self._dirty:
                    del self._dirty[block]
                    self._to_zero.append(block)
        return blocks

    def acquire(self, blocks: list[int]) -> None:
        """One more reference to each of the cached blocks of a `Match`."""
        if not blocks:
            return
        counts = self.ref_counts[blocks]
        for block, count in zip(blocks, counts.tolist(), strict=True):
            if count == 0:
                del self._lru[block]
        self.ref_counts[blocks] = counts + 1

    def release(self, blocks: np.ndarray) -> None:
        """Give up one reference to each block of a sequence, in order of position.

        Tails go first into the LRU order, so that a chain is evicted from its end.
        """
        blocks = blocks[::-1]
        counts = self.ref_counts[blocks] - 1
        self.ref_counts[blocks] = counts
        ready, lru, freed = self._ready, self._lru, []
        for block in blocks[counts == 0].tolist():
            if ready[block]:
                lru[block] = None
            else:
                freed.append(block)
        self._set_free(freed)

    def release_private(self, blocks: np.ndarray) -> None:
        """Give back blocks that nobody shares and no node names: reserved and not used."""
        self.ref_counts[blocks] = 0
        self._free += blocks.tolist()

    def count_unreferenced(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if self.ref_counts[block] == 0)

    def count_sole(self, blocks: np.ndarray) -> int:
        """How many of them would become available if their one holder let go."""
        return int(np.count_nonzero(self.ref_counts[blocks] == 1))

    def take_to_zero(self) -> np.ndarray:
        """Blocks handed out since the last call that must be zeroed before their first use."""
        if not self._to_zero:
            return _NONE
        blocks = np.asarray(self._to_zero, dtype=np.int32)
        self._to_zero = []
        return blocks

    # ---- prefix cache -------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, max_blocks: int) -> Match:
        """The longest ready prefix of `tokens` (int32), in whole blocks, at most `max_blocks`."""
        blocks: list[int] = []
        uid = ROOT_UID
        for name in self._names(tokens, 0, max_blocks):
            block = self._index.get((uid, name))
            if block is None:
                break
            if not self._ready[block]:
                return Match(blocks, uid, promised=True)
            blocks.append(block)
            uid = self._uids[block]
        return Match(blocks, uid, promised=False)

    def uids_of(self, blocks: list[int]) -> set[int]:
        """Of the nodes of a match, and of the root."""
        uids = self._uids
        return {ROOT_UID, *(uids[block] for block in blocks)}

    def name_chain(
        self, blocks: list[int], parent_uid: int, tokens: np.ndarray, first_index: int
    ) -> int:
        """Name the nodes that `blocks` hold, or that their holder will compute (promises); returns
        the uid of the last one. They are those at `first_index` and on of a sequence of `tokens`
        (int32). Where a node exists already (another sequence has computed it meanwhile), the block
        stays private and the existing uid carries the chain on.
        """
        keys, uids, uid, next_uid = self._keys, self._uids, parent_uid, self._next_uid
        node_of = self._index.setdefault
        names = self._names(tokens, first_index, first_index + len(blocks))
        for block, name in zip(blocks, names, strict=True):
            key = (uid, name)
            node = node_of(key, block)
            if node == block:
                keys[block] = key
                uids[block] = uid = next_uid
                next_uid += 1
            else:
                uid = uids[node]
        self._next_uid = next_uid
        return uid

    def mark_ready(self, blocks: list[int]) -> None:
        """Their KV is complete and verified. A block without a node is left alone."""
        keys, ready = self._keys, self._ready
        for block in blocks:
            if keys[block] is not None:
                ready[block] = 1

    def taint(self, blocks: np.ndarray) -> None:
        """Non-finite values may be in these blocks: out of the cache, zeroed before reuse."""
        held = blocks.tolist()
        self._forget(held)
        self._dirty.update(dict.fromkeys(held))

    def clear_cache(self) -> None:
        """Forget every node: the executor lost the KV."""
        self._set_free(self._lru)
        self._lru.clear()
        self._forget(range(self.num_blocks))

    # ---- inside -------------------------------------------------------------------------------

    def _names(self, tokens: np.ndarray, first: int, last: int) -> list[bytes]:
        """The token ids of each block, as a node's key has them."""
        size = self.block_size
        names: list[bytes] = tokens[first * size : last * size].view(self._name_type).tolist()
        return names

    def _set_free(self, blocks: Collection[int]) -> None:
        """Blocks that nobody refers to any more, the last to be used next."""
        self._forget(blocks)
        self._free += blocks

    def _forget(self, blocks: Iterable[int]) -> None:
        """Nothing that is in them counts; their nodes, of those that have one, leave the index."""
        index, keys, ready, draft_valid = self._index, self._keys, self._ready, self._draft_valid
        for block in blocks:
            draft_valid[block] = 0
            key = keys[block]
            if key is not None:
                del index[key]
                keys[block] = None
                ready[block] = 0

    def _evict(self, count: int) -> None:
        """Free the oldest of the cached blocks, to be used after those that are free already."""
        popitem = self._lru.popitem
        evicted = [popitem(last=False)[0] for _ in range(count)]
        self._forget(evicted)
        self._free[:0] = reversed(evicted)

    def check(self) -> None:
        """Every invariant of the pool; raises AssertionError."""
        free = self._free
        referenced = int(np.count_nonzero(self.ref_counts))
        assert (self.ref_counts >= 0).all(), "negative reference count"
        assert len(free) + referenced + len(self._lru) == self.num_blocks, (
            f"{len(free)} free + {referenced} referenced + {len(self._lru)} cached "
            f"!= {self.num_blocks}"
        )
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert (self.ref_counts[free] == 0).all(), "a free block is referenced"
        assert not any(self._ready[b] for b in free), "a free block is cached"
        assert all(self.ref_counts[b] == 0 and self._ready[b] for b in self._lru)
        assert len(self._index) == sum(key is not None for key in self._keys)
        assert all(self._keys[block] == key for key, block in self._index.items())
