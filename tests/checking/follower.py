"""A follower of a prefix cache by its events alone, and the contents of the cache, read without
events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from cbatch.core.scheduler.block_pool import BlockPool, Node, root_of

END = 2**64 - 1  # the sequence number that ends a replay


class Follower:
    """A client that reads batches, and raises if one contradicts earlier ones. It has a digest of
    the whole prefix of every block."""

    def __init__(self) -> None:
        # By hash: the parent's hash, the digest.
        self.blocks: dict[int, tuple[int | None, bytes]] = {}
        self.num_events: dict[str, int] = {}

    def take(self, batch: bytes) -> None:
        ts, events, rank = msgspec.msgpack.decode(batch)
        assert isinstance(ts, float) and rank == 0
        for event in events:
            kind = event.pop("type")
            self.num_events[kind] = self.num_events.get(kind, 0) + 1
            getattr(self, f"_on_{kind}")(**event)

    @property
    def prefixes(self) -> set[bytes]:
        """Return cached prefixes by digest. All parents of a cached block are cached."""
        for parent, _ in self.blocks.values():
            assert parent is None or parent in self.blocks, "a block without those before it"
        prefixes = {digest for _, digest in self.blocks.values()}
        assert len(prefixes) == len(self.blocks), "one prefix under two hashes"
        return prefixes

    def _on_BlockStored(  # noqa: N802 - vLLM's name
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        extra_keys: list[list[str] | None],
        **constant: Any,
    ) -> None:
        assert constant == {
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        assert len(token_ids) == block_size * len(block_hashes)
        assert len(extra_keys) == len(block_hashes) and not any(extra_keys[1:])
        parent, salt = parent_block_hash, extra_keys[0]
        assert parent is None or salt is None, "a salt in the middle of a prompt"
        before = digest_of_root(None if salt is None else salt[0])
        if parent is not None:
            before = self.blocks[parent][1]
        for i, block_hash in enumerate(block_hashes):
            assert block_hash not in self.blocks, "stored twice"
            before = digest(before, token_ids[i * block_size : (i + 1) * block_size])
            self.blocks[block_hash] = parent, before
            parent = block_hash

    def _on_BlockRemoved(  # noqa: N802
        self, block_hashes: list[int], medium: str, group_idx: int
    ) -> None:
        assert (medium, group_idx) == ("GPU", 0)
        for block_hash in block_hashes:
            del self.blocks[block_hash]

    def _on_AllBlocksCleared(self) -> None:  # noqa: N802
        self.blocks.clear()


def digest_of_root(salt: str | None) -> bytes:
    return b"" if salt is None else hashlib.sha256(salt.encode()).digest()


def digest(before: bytes, token_ids: Iterable[int]) -> bytes:
    return hashlib.sha256(before + np.asarray(token_ids, dtype="<i4").tobytes()).digest()


def cached_prefixes(pool: BlockPool, salts: Iterable[str | None] = (None,)) -> set[bytes]:
    """Return the prefixes that a lookup would hit, from the pool's own arrays: ready nodes whose
    parents are ready."""
    reached = {root_of(salt).uid: digest_of_root(salt) for salt in salts}
    digests = set()
    for uid, block in sorted((uid, block) for block, uid in enumerate(pool._uids.tolist()) if uid):
        # A node that is not hashed follows the one that was named just before it.
        above = pool._parents.item(block) if pool._hashed[block] else uid - 1
        if above in reached and pool._ready[block]:
            token_ids = np.frombuffer(pool._contents.item(block), dtype=np.int32)
            reached[uid] = digest(reached[above], token_ids.tolist())
            digests.add(reached[uid])
    return digests


def hits(pool: BlockPool, salts: Iterable[str | None], alphabet: Iterable[int]) -> set[bytes]:
    """Return the same by lookups alone, for blocks that repeat one token of the alphabet."""
    return {d for salt in salts for d in _hits(pool, root_of(salt), [*alphabet])}


def _hits(pool: BlockPool, root: Node, alphabet: list[int]) -> Iterator[bytes]:
    size, waiting = pool.block_size, [((), digest_of_root(root.salt))]
    while waiting:
        blocks, before = waiting.pop()
        for token in alphabet:
            longer = (*blocks, token)
            tokens = np.repeat(np.array(longer, dtype=np.int32), size)
            if len(pool.match(tokens, len(longer), root).blocks) == len(longer):
                after = digest(before, [token] * size)
                waiting.append((longer, after))
                yield after
