"""Sizes of the KV cache: how the memory is split between blocks and state pages."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.slot_pages import pages_per_slot
from cbatch.engine.info import total_weight_bytes
from cbatch.engine.options import EngineOptions
from cbatch.runtime.backend import LargestStep, LoadedModels

_MIN_INTERVAL, _MAX_INTERVAL = 8, 256  # defaults of `state_interval`, in blocks


class CacheSizes(NamedTuple):
    """Fields of the scheduler's configuration."""

    num_blocks: int
    num_state_pages: int
    state_interval: int


def cache_sizes(models: LoadedModels, options: EngineOptions, largest: LargestStep) -> CacheSizes:
    """Return the sizes that the options give, or that fit the memory for KV. By default there are
    enough blocks for all slots at full length, if the memory suffices.

    With recurrent layers each slot has the pages that it may need and one for a cached prefix, but
    all slots together have at most half of the memory: with less, fewer sequences run at once.
    Longer prefixes have a page per `state_interval` blocks, by default as large as their KV."""
    memory_bytes = None if options.num_blocks is not None else _memory(models, options, largest)
    block_bytes: float = models.kv_block_bytes(largest.block_size)
    page_bytes, slot_bytes = models.state_bytes(largest.block_size, largest.max_drafts)
    num_pages, interval, caches = 0, 1, options.enable_prefix_caching
    if page_bytes:
        # Without attention a block has no bytes; this is then the share that limits their number.
        block_bytes = block_bytes or page_bytes / _MAX_INTERVAL
        interval = min(max(int(page_bytes / block_bytes), _MIN_INTERVAL), _MAX_INTERVAL)
        interval = options.state_interval or interval
        overlaps = options.overlap == 1
        per_slot = pages_per_slot(largest.max_drafts, largest.block_size, overlaps=overlaps)
        num_pages = options.num_state_pages or options.max_num_seqs * (per_slot + caches)
        if memory_bytes is not None:
            memory_bytes -= options.max_num_seqs * slot_bytes
            if options.num_state_pages is None:
                num_pages = max(per_slot, min(num_pages, memory_bytes // (2 * page_bytes)))
            memory_bytes -= num_pages * page_bytes
    else:
        for field in ("num_state_pages", "state_interval"):
            if getattr(options, field) is not None:
                problem = "would be ignored, since the model has no recurrent layers"
                raise FieldError(field, problem, "leave it out")
    adds_pages = num_pages > 0 and caches and options.num_state_pages is None
    num_blocks = options.num_blocks or 0
    if memory_bytes is not None:
        block_bytes += adds_pages * page_bytes / interval
        num_blocks = _num_blocks(options, largest, memory_bytes, block_bytes)
    num_pages += adds_pages * -(-num_blocks // interval)
    return CacheSizes(num_blocks, num_pages, interval)


def _memory(models: LoadedModels, options: EngineOptions, largest: LargestStep) -> int:
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    share = options.gpu_memory_utilization
    memory_bytes = models.kv_memory_bytes(largest, share, total_weight_bytes(models))
    if memory_bytes <= 0:
        problem = f"weights and buffers need more than {share} of the memory"
        raise FieldError("gpu_memory_utilization", problem, "give a larger share")
    return memory_bytes


def _num_blocks(
    options: EngineOptions, largest: LargestStep, memory_bytes: int, block_bytes: float
) -> int:
    num_blocks = int(memory_bytes / block_bytes)
    given_bytes = options.kv_cache_memory_bytes
    if given_bytes is None:
        full_slots = options.max_num_seqs * -(-largest.max_sequence_tokens // largest.block_size)
        return max(1, min(full_slots, num_blocks))
    if num_blocks < 1:
        needed_bytes = given_bytes - memory_bytes + ceil(block_bytes)
        remedy = f"give at least {needed_bytes} bytes ({needed_bytes / 2**30:.2g} GiB)"
        raise FieldError("kv_cache_memory_bytes", "does not hold one block", remedy)
    return num_blocks
