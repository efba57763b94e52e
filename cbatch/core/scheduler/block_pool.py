"""KV blocks: reference counts, and a prefix cache that shares blocks without copies.

The prefix cache is a trie of blocks, with a root for each salt. The key of a node is (uid of the
parent node, the block's token ids). So a hit compares the tokens themselves, not a hash of them,
and a path of hits compares the whole prefix. Uids are never reused. A sequence adds a run of nodes
in one call. Only the first node of a run is in the hash table, and links lead to its other nodes.
So blocks are added and removed as arrays, not one by one.

A node is *promised* while a running sequence is computing its KV, and *ready* once that KV is
complete and verified.
"""

from __future__ import annotations

import hashlib
from itertools import takewhile
from typing import NamedTuple

import msgspec
import numpy as np

from cbatch.core.scheduler.caching_pool import CachingPool
from cbatch.core.scheduler.page_pool import PagePool

_NONE = np.zeros(0, dtype=np.int32)


class Node(NamedTuple):
    """A node of the trie, valid while its block has this `uid`. A root has no block."""

    uid: int
    block: int | None
    salt: str | None = None  # set only for a root


ROOT = Node(0, None)
_SALTED_UID = 2**62  # smallest uid of a salted root; other uids count up from 1 and stay below


def root_of(salt: str | None) -> Node:
    """Return the root for prompts with this salt. Its uid is a digest of the salt, so that no table
    of salts is needed."""
    if salt is None:
        return ROOT
    digest = hashlib.sha256(salt.encode()).digest()[:8]
    return Node(_SALTED_UID | int.from_bytes(digest) >> 2, None, salt)


class Match(msgspec.Struct, frozen=True):
    """The longest ready prefix of a prompt."""

    blocks: list[int]
    node: Node  # of the last block, or the root
    promised: bool  # a running sequence is computing the next block, so it pays to wait
    num_known: int  # blocks that have a node, ready or promised, and with a state page or without


class BlockPool(CachingPool):
    """Allocates `num_blocks` blocks of `block_size` positions each, and caches prefixes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.num_blocks = num_blocks
        self.pages: PagePool | None = None  # set for models with recurrent layers
        self.block_size = block_size
        # By block: whether the draft model's KV is complete, too.
        self.draft_valid = np.zeros(num_blocks, dtype=np.bool_)
        # By block: whether its node is in `_index`; its node's uid (the root's, if it has no node);
        # the uid of the node's parent, if the node is in `_index`. `_ready`: its node is ready.
        self._hashed = np.zeros(num_blocks, dtype=np.bool_)
        self._uids, self._parents = np.zeros((2, num_blocks), dtype=np.int64)
        # By block: its token ids as bytes, and the next block of its run, which may have been
        # reused for another node since.
        content = np.dtype((np.void, 4 * block_size))
        self._contents: np.ndarray = np.zeros(num_blocks, dtype=content)
        self._next = np.zeros(num_blocks, dtype=np.intp)
        self._index: dict[tuple[int, bytes], int] = {}  # block by (parent's uid, content)
        self._next_uid = ROOT.uid + 1
        self._dirty: dict[int, None] = {}  # blocks with non-finite values: zero before reuse
        self._to_zero: list[int] = []

    # ---- counts -------------------------------------------------------------------------------

    def num_blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for the KV of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def occupancy(self, max_cells: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return a map of the pool with at most `max_cells` cells: the blocks per cell (the last
        may have fewer), and per cell the numbers of referenced blocks and of cached unreferenced
        blocks, both intp [cells]."""
        size = -(-self.num_blocks // max_cells)
        starts = np.arange(0, self.num_blocks, size)
        referenced = self.ref_counts > 0
        cached = self._ready & ~referenced
        used = np.add.reduceat(referenced, starts, dtype=np.intp)
        return size, used, np.add.reduceat(cached, starts, dtype=np.intp)

    # ---- allocation ---------------------------------------------------------------------------

    def allocate(self, count: int) -> np.ndarray:
        blocks = CachingPool.allocate(self, count)
        if self._dirty:
            for block in blocks.tolist():
                if block in self._dirty:
                    del self._dirty[block]
                    self._to_zero.append(block)
        return blocks

    def release(self, blocks: np.ndarray) -> None:
        """Remove a reference from each block of a sequence, given in order of position.

        The last block enters the LRU order first, so that a prefix is evicted from its end.
        """
        super().release(blocks[::-1])

    def release_private(self, blocks: np.ndarray) -> None:
        """Free reserved but unused blocks, which have one reference and no node."""
        self.ref_counts[blocks] = 0
        self._free += blocks.tolist()

    def count_unreferenced(self, blocks: list[int]) -> int:
        return list(map(self.ref_counts.item, blocks)).count(0)

    def count_unshared(self, blocks: np.ndarray) -> int:
        """Return how many blocks would become available if one sequence released them all."""
        return int(np.count_nonzero(self.ref_counts[blocks] == 1))

    def take_to_zero(self) -> np.ndarray:
        """Return the blocks allocated since the last call that must be zeroed before use, int32."""
        if not self._to_zero:
            return _NONE
        blocks = np.asarray(self._to_zero, dtype=np.int32)
        self._to_zero = []
        return blocks

    # ---- prefix cache -------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, max_blocks: int, root: Node = ROOT) -> Match:
        """Return the longest ready prefix of `tokens` (int32) in at most `max_blocks` blocks. With
        recurrent layers it ends at a node that owns a state page."""
        path = self._descend(root, self._contents_of(tokens, 0, max_blocks))
        hits = list(takewhile(self._ready.item, path))
        promised = len(hits) < len(path)
        if self.pages is not None:
            promised = self.pages.any_promised(path[len(hits) :])
            hits = hits[: self.pages.longest(hits)]
        node = self._node(hits[-1]) if hits else root
        return Match(hits, node, promised, len(path))

    def ready_path(self, tokens: np.ndarray, max_blocks: int, root: Node) -> list[int]:
        """Return the ready blocks along `tokens`, with or without state pages."""
        path = self._descend(root, self._contents_of(tokens, 0, max_blocks))
        return list(takewhile(self._ready.item, path))

    def node_uids(self, blocks: list[int], root: Node) -> set[int]:
        """Return the uids of the nodes of a match, and of the root."""
        return {root.uid, *map(self._uids.item, blocks)}

    def add_nodes(
        self, blocks: np.ndarray, parent: Node, tokens: np.ndarray, first_index: int
    ) -> Node:
        """Add nodes for `blocks` after `parent`, and return the node of the last block.

        The blocks, complete or promised, are those from index `first_index` of a sequence of
        `tokens` (int32). If another sequence has added a node with the same content meanwhile, that
        node is used, and the block stays private to this sequence.
        """
        contents = self._contents_of(tokens, first_index, first_index + len(blocks))
        path = self._descend(parent, contents)
        if path:
            parent = self._node(path[-1])
            blocks, contents = blocks[len(path) :], contents[len(path) :]
        if not len(blocks):
            return parent
        # After the first new node all nodes are new. One uid is skipped after a run: `_next` of its
        # last block is outdated, and a next run that began there would seem to continue this run.
        first, last = blocks.item(0), blocks.item(-1)
        first_uid, end_uid = self._next_uid, self._next_uid + len(blocks)
        self._uids[blocks] = np.arange(first_uid, end_uid)
        self._next_uid = end_uid + 1
        self._contents[blocks] = contents
        self._next[blocks[:-1]] = blocks[1:]
        self._hashed[first] = True
        self._parents[first] = parent.uid
        self._index[parent.uid, contents.item(0)] = first
        return Node(end_uid - 1, last)

    def mark_ready(self, blocks: np.ndarray) -> None:
        """Mark the blocks with a node as ready. Their KV is complete and verified."""
        self._ready[blocks] = self._uids[blocks]  # 0, which is False, for a block without a node

    def taint(self, blocks: np.ndarray) -> None:
        """Remove blocks that may have non-finite values from the cache, and zero them before
        reuse."""
        self._forget(blocks)
        self._dirty.update(dict.fromkeys(blocks.tolist()))

    def clear_cache(self) -> None:
        """Remove every node, because the executor lost the KV."""
        self._free += self._cached.take(len(self._cached)).tolist()
        self._forget(np.arange(self.num_blocks))

    # ---- inside -------------------------------------------------------------------------------

    def _contents_of(self, tokens: np.ndarray, first: int, last: int) -> np.ndarray:
        size = self.block_size
        return tokens[first * size : last * size].view(self._contents.dtype)

    def _node(self, block: int) -> Node:
        return Node(self._uids.item(block), block)

    def _descend(self, node: Node, contents: np.ndarray) -> list[int]:
        """Return the blocks of the longest path below `node` that has these contents."""
        path: list[int] = []
        while True:
            run = self._follow_run(node, contents[len(path) :])
            if run:
                path += run
                node = self._node(path[-1])
            if len(path) == len(contents):
                return path
            block = self._index.get((node.uid, contents.item(len(path))))
            if block is None:
                return path
            path.append(block)
            node = self._node(block)

    def _follow_run(self, node: Node, contents: np.ndarray) -> list[int]:
        """Return the blocks after `node` in its run that have these contents. Uids of a run are
        consecutive."""
        uid, block = node.uid, node.block
        run: list[int] = []
        if block is None or self._uids.item(block) != uid:
            return run
        for _ in range(len(contents)):
            block = self._next.item(block)
            uid += 1
            if self._uids.item(block) != uid:
                break
            run.append(block)
        if run:
            equal = (self._contents[run] == contents[: len(run)]).tolist()
            run = run[: equal.index(False)] if False in equal else run
        return run

    def _forget(self, blocks: np.ndarray) -> None:
        """Invalidate the contents of blocks, and remove their nodes from the trie."""
        if self.pages is not None:
            self.pages.forget_blocks(blocks)
        self.draft_valid[blocks] = False
        self._uids[blocks] = ROOT.uid
        self._ready[blocks] = False
        hashed = self._hashed[blocks]
        if True not in hashed.tobytes():
            return
        for block in blocks[hashed].tolist():
            self._hashed[block] = False
            del self._index[self._parents.item(block), self._contents.item(block)]

    def check(self) -> None:
        """Raise `AssertionError` if an invariant of the pool is violated."""
        super().check()
        if self.pages is not None:
            self.pages.check()
        assert (self._uids[self._free] == ROOT.uid).all(), "a free block is cached"
        has_node = self._uids != ROOT.uid
        assert not (self._ready & ~has_node).any(), "ready, but no node"
        blocks = [*self._index.values()]
        assert sorted(blocks) == self._hashed.nonzero()[0].tolist() and has_node[blocks].all()
        keys = zip(self._parents[blocks].tolist(), self._contents[blocks].tolist(), strict=True)
        assert [*keys] == [*self._index]
