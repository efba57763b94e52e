"""A block pool that records what enters and leaves its prefix cache, for KV events.

A block is *in* the cache while a lookup of its prefix would hit it: it is ready, and so are all
blocks before it in the prefix. When a block is evicted, the blocks after it leave the cache, too,
although their KV is still there: no lookup can reach them.

The hash of a block depends only on its prefix (the tokens and the root's salt). It is equal in
every run and every engine.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from cbatch.core.scheduler.block_pool import ROOT, BlockPool, Node


class BlocksStored(msgspec.Struct):
    """Consecutive blocks of a prefix that entered the cache."""

    hashes: list[int]  # 64 bits, unsigned
    parent_hash: int | None  # of the block before them; None: they begin a prompt
    token_ids: list[int]  # of all blocks
    salt: str | None  # of the prompt, if they begin it


class BlocksRemoved(msgspec.Struct):
    """Blocks that left the cache."""

    hashes: list[int]


class CacheCleared(msgspec.Struct):
    """All blocks left the cache."""


CacheChange = BlocksStored | BlocksRemoved | CacheCleared


class _Entry(msgspec.Struct, eq=False):
    """A node that is in the cache, or will be once it and all nodes before it are ready."""

    uid: int
    block: int
    parent: _Entry | Node  # the node before it, or the root
    ready: bool = False
    hash: int | None = None  # None: the node is not in the cache
    children: dict[int, _Entry] = {}  # by uid


class RecordedBlockPool(BlockPool):
    """A block pool that keeps its changes until `take_changes` is called, without a limit."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._entries: dict[int, _Entry] = {}  # by uid
        self._changes: list[CacheChange] = []

    def take_changes(self) -> list[CacheChange]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def add_nodes(
        self, blocks: np.ndarray, parent: Node, tokens: np.ndarray, first_index: int
    ) -> Node:
        first_uid = self._next_uid
        last = super().add_nodes(blocks, parent, tokens, first_index)
        if self._next_uid == first_uid:
            return last
        added = blocks[len(blocks) - (last.uid + 1 - first_uid) :].tolist()
        parent_uid = self._parents.item(added[0])
        is_first = parent.block is None and parent.uid == parent_uid
        previous = parent if is_first else self._entries.get(parent_uid)
        if previous is None:
            return last  # the previous block was evicted, so no lookup will reach these blocks
        for uid, block in enumerate(added, first_uid):
            entry = self._entries[uid] = _Entry(uid, block, previous)
            if isinstance(previous, _Entry):
                previous.children[uid] = entry
            previous = entry
        return last

    def mark_ready(self, blocks: np.ndarray) -> None:
        super().mark_ready(blocks)
        for uid in self._uids[blocks].tolist():
            entry = self._entries.get(uid)
            if entry is not None and not entry.ready:
                entry.ready = True
                self._store(entry)

    def clear_cache(self) -> None:
        self._entries.clear()
        super().clear_cache()
        self._changes = [CacheCleared()]

    def _forget(self, blocks: np.ndarray) -> None:
        uids = self._uids[blocks]
        super()._forget(blocks)
        for uid in uids[uids != ROOT.uid].tolist():
            entry = self._entries.get(uid)
            if entry is not None:
                self._remove(entry)

    def _store(self, entry: _Entry) -> None:
        """Record that an entry that became ready enters the cache, together with the ready entries
        after it."""
        pending = [entry]
        while pending:
            entry = pending.pop()
            parent = entry.parent
            if not entry.ready or (isinstance(parent, _Entry) and parent.hash is None):
                continue
            content = self._contents.item(entry.block)
            parent_hash, salt = _hash_and_salt(parent)
            seed = parent.uid if parent_hash is None else parent_hash
            entry.hash = _hash(seed, content)
            token_ids = np.frombuffer(content, dtype=np.int32).tolist()
            self._record(BlocksStored([entry.hash], parent_hash, token_ids, salt))
            pending += reversed(entry.children.values())

    def _record(self, change: BlocksStored | BlocksRemoved) -> None:
        """Append a change, or merge it with the last change if it continues that change."""
        latest = self._changes[-1] if self._changes else None
        match latest, change:
            case BlocksStored(), BlocksStored() if latest.hashes[-1] == change.parent_hash:
                latest.hashes += change.hashes
                latest.token_ids += change.token_ids
            case BlocksRemoved(), BlocksRemoved():
                latest.hashes += change.hashes
            case _:
                self._changes.append(change)

    def _remove(self, entry: _Entry) -> None:
        if isinstance(entry.parent, _Entry):
            del entry.parent.children[entry.uid]
        pending, hashes = [entry], []
        while pending:
            entry = pending.pop()
            del self._entries[entry.uid]
            pending += entry.children.values()
            entry.children.clear()  # breaks the reference cycle
            if entry.hash is not None:
                hashes.append(entry.hash)
        if hashes:
            self._record(BlocksRemoved(hashes))

    def check(self) -> None:
        """Also check that an entry is in the cache if, and only if, it is ready and its parent is
        in the cache."""
        super().check()
        for uid, entry in self._entries.items():
            parent = entry.parent
            assert self._uids.item(entry.block) == uid == entry.uid, "the block has another node"
            assert entry.ready == self._ready.item(entry.block)
            reached = isinstance(parent, Node) or parent.hash is not None
            assert (entry.hash is not None) == (entry.ready and reached)


def _hash_and_salt(parent: _Entry | Node) -> tuple[int | None, str | None]:
    """Return the hash of an entry, or the salt of a root; the other is None."""
    return (parent.hash, None) if isinstance(parent, _Entry) else (None, parent.salt)


def _hash(seed: int, content: bytes) -> int:
    """Return the hash of a block; `seed` is the hash of the block before it, or the root's uid."""
    digest = hashlib.blake2b(seed.to_bytes(8, "big") + content, digest_size=8).digest()
    return int.from_bytes(digest, "big")
