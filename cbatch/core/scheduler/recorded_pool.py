"""A block pool that keeps a record of what enters and leaves its prefix cache, for those who follow
it from outside.

A block is *in* the cache while a lookup of its prefix would hit it: it is ready, and so are all
blocks before it. One behind a block that was evicted is out, though it holds its KV yet: its node
hangs under a uid that is never used again.

The hash of a block is a function of its prefix (the tokens, and the root's salt) and of nothing
else: the same in every run and every engine.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from cbatch.core.scheduler.block_pool import ROOT, BlockPool, Node


class BlocksStored(msgspec.Struct):
    """Blocks that have come in, each of which follows the one before it, the first the block of
    `parent_hash`; None: they begin a prompt. `salt` is that of their prompt's, if they begin it."""

    hashes: list[int]  # 64 bits, unsigned
    parent_hash: int | None
    token_ids: list[int]  # of all blocks
    salt: str | None


class BlocksRemoved(msgspec.Struct):
    """Blocks that have gone."""

    hashes: list[int]


class CacheCleared(msgspec.Struct):
    """Everything has gone."""


CacheChange = BlocksStored | BlocksRemoved | CacheCleared


class _Entry(msgspec.Struct, eq=False):
    """A node that can still be found, or will be once it and those before it are ready. `above` is
    the node before it, or the root."""

    uid: int
    block: int
    above: _Entry | Node
    ready: bool = False
    hash: int | None = None  # None: it is not in the cache
    below: dict[int, _Entry] = {}  # by uid


class RecordedBlockPool(BlockPool):
    """Its records wait until they are taken; what nobody takes piles up."""

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        super().__init__(num_blocks, block_size_tokens)
        self._entries: dict[int, _Entry] = {}  # by uid
        self._changes: list[CacheChange] = []

    def take_changes(self) -> list[CacheChange]:
        """Since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def name_chain(
        self, blocks: np.ndarray, parent: Node, tokens: np.ndarray, first_index: int
    ) -> Node:
        first_uid = self._next_uid
        last = super().name_chain(blocks, parent, tokens, first_index)
        if self._next_uid == first_uid:
            return last
        named = blocks[len(blocks) - (last.uid + 1 - first_uid) :].tolist()
        above_uid = self._parents.item(named[0])
        is_first = parent.block is None and parent.uid == above_uid
        above = parent if is_first else self._entries.get(above_uid)
        if above is None:
            return last  # what they follow is gone: nobody will find them
        for uid, block in enumerate(named, first_uid):
            entry = self._entries[uid] = _Entry(uid, block, above)
            if isinstance(above, _Entry):
                above.below[uid] = entry
            above = entry
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
        """It has become ready; so those after it that are ready already come in, too."""
        waiting = [entry]
        while waiting:
            entry = waiting.pop()
            above = entry.above
            if not entry.ready or (isinstance(above, _Entry) and above.hash is None):
                continue
            content = self._names.item(entry.block)
            parent_hash, salt = _parent_of(above)
            seed = above.uid if parent_hash is None else parent_hash
            entry.hash = _hash(seed, content)
            token_ids = np.frombuffer(content, dtype=np.int32).tolist()
            self._record(BlocksStored([entry.hash], parent_hash, token_ids, salt))
            waiting += reversed(entry.below.values())

    def _record(self, change: BlocksStored | BlocksRemoved) -> None:
        """As one with the change before it, where that is of the same kind and goes on so."""
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
        """It and all that comes after it."""
        if isinstance(entry.above, _Entry):
            del entry.above.below[entry.uid]
        gone, hashes = [entry], []
        while gone:
            entry = gone.pop()
            del self._entries[entry.uid]
            gone += entry.below.values()
            entry.below.clear()  # no circle is left to the garbage collector
            if entry.hash is not None:
                hashes.append(entry.hash)
        if hashes:
            self._record(BlocksRemoved(hashes))

    def check(self) -> None:
        """And that those in the cache are those that are ready, behind others that are in it."""
        super().check()
        for uid, entry in self._entries.items():
            above = entry.above
            assert self._uids.item(entry.block) == uid == entry.uid, "the block has another node"
            assert entry.ready == self._ready.item(entry.block)
            reached = isinstance(above, Node) or above.hash is not None
            assert (entry.hash is not None) == (entry.ready and reached)


def _parent_of(above: _Entry | Node) -> tuple[int | None, str | None]:
    """Its hash, if it is a block; of a root the salt."""
    return (above.hash, None) if isinstance(above, _Entry) else (None, above.salt)


def _hash(before: int, content: bytes) -> int:
    """Of a block, by the hash of the one before it (or its root's uid) and its own tokens."""
    digest = hashlib.blake2b(before.to_bytes(8, "big") + content, digest_size=8).digest()
    return int.from_bytes(digest, "big")
