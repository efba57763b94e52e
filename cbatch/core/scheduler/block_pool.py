"""Blocks of KV memory: reference counts, and a prefix cache that shares them without copies.

A block is in exactly one of three states: free, referenced (by one or more sequences), or cached
and unreferenced (kept for a future prefix hit, evicted least recently used first):
`free + referenced + cached_unreferenced == total`.

The prefix cache is a trie of blocks, with a root for each salt. A node is (uid of the parent node,
the block's own token ids), so a hit compares the tokens themselves and a chain of hits compares the
whole prefix; uids are never used twice. A sequence adds many nodes in one go, each of which leads
to the next; only the first is found by hashing its tokens. So blocks come and go as arrays, not one
by one. A node is
*promised* when a running sequence is about to compute it, and *ready* once its KV is verified and
complete.
"""

from __future__ import annotations

import hashlib
from itertools import takewhile
from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.scheduler.lru import ReleaseOrder
from cbatch.core.scheduler.slot_table import ONE, ZERO

_NONE = np.zeros(0, dtype=np.int32)


class Node(NamedTuple):
    """A node of the trie, and the block that holds it as long as its uid is that block's."""

    uid: int
    block: int | None
    salt: str | None = None  # of a root


ROOT = Node(0, None)
_SALTED_UID = 2**62  # and above: roots; the nodes, which count up from 1, never get there


def root_of(salt: str | None) -> Node:
    """Where the prefixes of requests with this salt begin, and no others. Its uid is a digest of
    the salt, so that no table of salts is kept, however many there are."""
    if salt is None:
        return ROOT
    digest = hashlib.sha256(salt.encode()).digest()[:8]
    return Node(_SALTED_UID | int.from_bytes(digest) >> 2, None, salt)


class Match(msgspec.Struct, frozen=True):
    """The longest ready prefix. `node` is its last; `promised` says that the very next block is
    being computed by a running sequence, so waiting for it beats computing it twice."""

    blocks: list[int]
    node: Node
    promised: bool


class BlockPool:
    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size_tokens
        self.ref_counts = np.zeros(num_blocks, dtype=np.int32)
        # True where the block's draft-model KV is complete too.
        self.draft_valid = np.zeros(num_blocks, dtype=np.bool_)
        # A stack; reversed so that a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = ReleaseOrder(num_blocks)  # and unreferenced
        # By block: its node's uid (the root's, if it has none) and name, which is its token ids; of
        # the hashed ones, the parent's uid; and the block that was named next, which may have
        # another node by now.
        self._ready, self._hashed = np.zeros((2, num_blocks), dtype=np.bool_)
        self._uids, self._parents = np.zeros((2, num_blocks), dtype=np.int64)
        name = np.dtype((np.void, 4 * block_size_tokens))
        self._names: np.ndarray = np.zeros(num_blocks, dtype=name)
        self._next = np.zeros(num_blocks, dtype=np.intp)
        self._index: dict[tuple[int, bytes], int] = {}  # the block of a hashed node
        self._next_uid = ROOT.uid + 1
        self._dirty: dict[int, None] = {}  # held non-finite values: zero before the next use
        self._to_zero: list[int] = []

    # ---- counts -------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def occupancy(self, most_cells: int) -> tuple[int, np.ndarray, np.ndarray]:
        """A map of at most so many cells: blocks a cell (the last may have fewer), and of each how
        many are referenced and how many cached and unreferenced, intp [cells]."""
        size = -(-self.num_blocks // most_cells)
        starts = np.arange(0, self.num_blocks, size)
        referenced = self.ref_counts > 0
        cached = self._ready & ~referenced
        used = np.add.reduceat(referenced, starts, dtype=np.intp)
        return size, used, np.add.reduceat(cached, starts, dtype=np.intp)

    # ---- allocation ---------------------------------------------------------------------------

    def allocate(self, count: int) -> np.ndarray:
        """`count` blocks with one reference each: free ones, then the oldest cached; so two calls
        hand out what one for both would. The caller has checked `num_available`. They are intp,
        numpy's own index type: with any other, each use as an index costs a conversion."""
        free = self._free
        taken = free[: -count - 1 : -1]
        if taken:
            del free[len(free) - len(taken) :]
            blocks = np.array(taken, dtype=np.intp)
            if len(taken) < count:
                blocks = np.concatenate([blocks, self._evict(count - len(taken))])
        else:
            blocks = self._evict(count)
        self.ref_counts[blocks] = ONE
        if self._dirty:
            for block in blocks.tolist():
                if block in self._dirty:
                    del self._dirty[block]
                    self._to_zero.append(block)
        return blocks

    def acquire(self, blocks: list[int]) -> None:
        """One more reference to each of the cached blocks of a `Match`."""
        if not blocks:
            return
        held = np.array(blocks)
        counts = self.ref_counts[held]
        self._cached.remove(held[counts == 0])
        self.ref_counts[held] = counts + 1

    def release(self, blocks: np.ndarray) -> None:
        """Give up one reference to each block of a sequence, in order of position.

        Tails go first into the LRU order, so that a chain is evicted from its end.
        """
        blocks = blocks[::-1]
        counts = self.ref_counts[blocks] - ONE
        self.ref_counts[blocks] = counts
        left = blocks[counts == ZERO]
        kept = self._ready[left]
        cached, freed = left[kept], left[~kept]
        if len(cached):
            self._cached.append(cached)
        if len(freed):
            self._forget(freed)
            self._free += freed.tolist()

    def release_private(self, blocks: np.ndarray) -> None:
        """Give back blocks that nobody shares and no node names: reserved and not used."""
        self.ref_counts[blocks] = 0
        self._free += blocks.tolist()

    def count_unreferenced(self, blocks: list[int]) -> int:
        return list(map(self.ref_counts.item, blocks)).count(0)

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

    def match(self, tokens: np.ndarray, max_blocks: int, root: Node = ROOT) -> Match:
        """The longest ready prefix of `tokens` (int32), in whole blocks, at most `max_blocks`."""
        path = self._descend(root, self._names_of(tokens, 0, max_blocks))
        hits = list(takewhile(self._ready.item, path))
        node = self._node(hits[-1]) if hits else root
        return Match(hits, node, promised=len(hits) < len(path))

    def uids_of(self, blocks: list[int], root: Node) -> set[int]:
        """Of the nodes of a match, and of the root."""
        return {root.uid, *map(self._uids.item, blocks)}

    def name_chain(
        self, blocks: np.ndarray, parent: Node, tokens: np.ndarray, first_index: int
    ) -> Node:
        """Name the nodes that `blocks` hold, or that their holder will compute (promises); returns
        the last one. They are those at `first_index` and on of a sequence of `tokens` (int32).
        Where a node exists already (another sequence has computed it meanwhile), the block stays
        private and the existing node carries the chain on.
        """
        names = self._names_of(tokens, first_index, first_index + len(blocks))
        path = self._descend(parent, names)
        if path:
            parent = self._node(path[-1])
            blocks, names = blocks[len(path) :], names[len(path) :]
        if not len(blocks):
            return parent
        # Behind a node that is new, all are. A uid is left out: the next run may begin at the block
        # that `_next` of the last of these points to of old, and must not seem to follow it.
        first, last = blocks.item(0), blocks.item(-1)
        first_uid, end_uid = self._next_uid, self._next_uid + len(blocks)
        self._uids[blocks] = np.arange(first_uid, end_uid)
        self._next_uid = end_uid + 1
        self._names[blocks] = names
        self._next[blocks[:-1]] = blocks[1:]
        self._hashed[first] = True
        self._parents[first] = parent.uid
        self._index[parent.uid, names.item(0)] = first
        return Node(end_uid - 1, last)

    def mark_ready(self, blocks: np.ndarray) -> None:
        """Their KV is complete and verified. A block without a node is left alone."""
        self._ready[blocks] = self._uids[blocks]  # the root's uid is 0, which is False

    def taint(self, blocks: np.ndarray) -> None:
        """Non-finite values may be in these blocks: out of the cache, zeroed before reuse."""
        self._forget(blocks)
        self._dirty.update(dict.fromkeys(blocks.tolist()))

    def clear_cache(self) -> None:
        """Forget every node: the executor lost the KV."""
        self._free += self._cached.take(len(self._cached)).tolist()
        self._forget(np.arange(self.num_blocks))

    # ---- inside -------------------------------------------------------------------------------

    def _names_of(self, tokens: np.ndarray, first: int, last: int) -> np.ndarray:
        """Of blocks that hold some of `tokens` (int32), by their index in the sequence."""
        size = self.block_size
        return tokens[first * size : last * size].view(self._names.dtype)

    def _node(self, block: int) -> Node:
        return Node(self._uids.item(block), block)

    def _descend(self, node: Node, names: np.ndarray) -> list[int]:
        """Blocks of the nodes that follow one another from `node` on, as far as `names` go."""
        path: list[int] = []
        while True:
            along = self._along(node, names[len(path) :])
            if along:
                path += along
                node = self._node(path[-1])
            if len(path) == len(names):
                return path
            block = self._index.get((node.uid, names.item(len(path))))
            if block is None:
                return path
            path.append(block)
            node = self._node(block)

    def _along(self, node: Node, names: np.ndarray) -> list[int]:
        """The same of nodes that were named in one go with `node`: their uids count on from its."""
        uid, block = node.uid, node.block
        along: list[int] = []
        if block is None or self._uids.item(block) != uid:
            return along
        for _ in range(len(names)):
            block = self._next.item(block)
            uid += 1
            if self._uids.item(block) != uid:
                break
            along.append(block)
        if along:
            like = (self._names[along] == names[: len(along)]).tolist()
            along = along[: like.index(False)] if False in like else along
        return along

    def _forget(self, blocks: np.ndarray) -> None:
        """Nothing that is in them counts; their nodes, of those that have one, leave the trie."""
        self.draft_valid[blocks] = False
        self._uids[blocks] = ROOT.uid
        self._ready[blocks] = False
        hashed = self._hashed[blocks]
        if True not in hashed.tobytes():
            return
        for block in blocks[hashed].tolist():
            self._hashed[block] = False
            del self._index[self._parents.item(block), self._names.item(block)]

    def _evict(self, count: int) -> np.ndarray:
        """The oldest of the cached blocks, which are now nowhere."""
        evicted = self._cached.take(count)
        self._forget(evicted)
        return evicted

    def check(self) -> None:
        """Every invariant of the pool; raises AssertionError."""
        free = self._free
        referenced = int(np.count_nonzero(self.ref_counts))
        assert (self.ref_counts >= 0).all(), "negative reference count"
        assert len(free) + referenced + len(self._cached) == self.num_blocks, (
            f"{len(free)} free + {referenced} referenced + {len(self._cached)} cached "
            f"!= {self.num_blocks}"
        )
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert (self.ref_counts[free] == 0).all(), "a free block is referenced"
        assert (self._uids[free] == ROOT.uid).all(), "a free block is cached"
        cached = self._cached.check()
        assert (self.ref_counts[cached] == 0).all() and self._ready[cached].all()
        named = self._uids != ROOT.uid
        assert not (self._ready & ~named).any(), "ready, but no node"
        assert sorted(self._index.values()) == self._hashed.nonzero()[0].tolist()
        for (uid, name), block in self._index.items():
            assert named[block] and self._parents[block] == uid
            assert self._names.item(block) == name
