"""vLLM's encoding of KV events: a batch is an array, its events are maps with a `type`. Names,
order and bytes match `vllm/distributed/kv_events.py` (0.32)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cbatch.core.scheduler.recorded_pool import (
    BlocksRemoved,
    BlocksStored,
    CacheChange,
    CacheCleared,
)

# vLLM calls the memory that the model computes with "GPU", even on a CPU. In its events "CPU" is
# memory that blocks are offloaded to.
MEDIUM = "GPU"
RANK = 0  # data-parallel rank; a server has one engine


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None
    extra_keys: list[tuple[str] | None] = []  # per block; a salted prompt's first block: its salt
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    block_hashes: list[int]
    medium: str = MEDIUM
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = RANK


_encoder = msgspec.msgpack.Encoder()


def encode_changes(changes: Sequence[CacheChange], now_s: float, block_size: int = 0) -> bytes:
    """Return an encoded batch. `now_s` is seconds since the epoch; `block_size` is needed
    only for stored blocks."""
    events = [_event_of(change, block_size) for change in changes]
    return _encoder.encode(KVEventBatch(now_s, events))


def encode_cleared(now_s: float) -> bytes:
    return encode_changes([CacheCleared()], now_s)


def _event_of(
    change: CacheChange, block_size: int
) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match change:
        case BlocksStored(hashes, parent_hash, token_ids, salt):
            first = None if salt is None else (salt,)
            return BlockStored(
                hashes,
                parent_hash,
                token_ids,
                block_size,
                extra_keys=[first, *[None] * (len(hashes) - 1)],
            )
        case BlocksRemoved(hashes):
            return BlockRemoved(hashes)
        case CacheCleared():
            return AllBlocksCleared()
