"""Memory of an engine: weights and KV blocks, in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.request.errors import FieldError
from cbatch.engine.backends import block_size_for, gpu_step_bytes, kv_dtype_of, num_ranks
from cbatch.engine.info import mib
from cbatch.engine.options import EngineOptions

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel

# Default share of memory for KV: of the machine's memory, or of the GPU memory that weights and the
# buffers of steps leave free.
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}


def num_blocks(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """Return the number of KV blocks: `options.num_blocks`, or as many as fit
    `options.kv_memory_bytes`, or enough for all slots at full length within the memory for KV."""
    if options.num_blocks is not None:
        return options.num_blocks
    size = block_bytes(target, draft, options)
    if options.kv_memory_bytes is not None:
        if options.kv_memory_bytes < size:
            remedy = f"give at least {size} bytes ({size / 2**30:.2g} GiB)"
            raise FieldError("kv_memory_bytes", "does not hold one block", remedy)
        return options.kv_memory_bytes // size
    full_slots = options.max_num_seqs * -(-max_tokens // block_size_for(target, options))
    kv_bytes = memory_for_kv_bytes(target, draft, options, max_tokens)
    return max(1, min(full_slots, kv_bytes // size))


def block_bytes(target: AnyModel, draft: AnyModel | None, options: EngineOptions) -> int:
    """Return the bytes of a KV block of target and draft, summed over all ranks."""
    from cbatch.runtime.kv_cache import KVCache

    size = block_size_for(target, options)
    # A head on a GPU stores a state per block in addition to its KV.
    return num_ranks(target) * sum(
        KVCache.block_bytes(model.config, size, kv_dtype_of(model, options.kv_cache_dtype))
        + getattr(model, "state_bytes", 0)
        for model in (target, draft)
        if model is not None
    )


def memory_for_kv_bytes(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """Return the default bytes for KV on the target's device. Raises `FieldError` if a GPU has too
    little memory for the buffers of a step."""
    import torch

    from cbatch.system.machine import memory_bytes

    device = torch.device(target.device)
    if device.type != "cuda":
        return int(memory_bytes() * MEMORY_SHARE["cpu"])
    free_bytes, _ = torch.cuda.mem_get_info(device)
    step_bytes = gpu_step_bytes(target, draft, options, max_tokens)
    if step_bytes >= free_bytes:
        raise FieldError(
            "max_num_seqs",
            f"steps need {mib(step_bytes)}, and the weights leave {mib(free_bytes)}",
            "use fewer slots, a smaller max_num_batched_tokens or max_model_len",
        )
    return int((free_bytes - step_bytes) * MEMORY_SHARE["cuda"])


def weight_bytes(model: AnyModel) -> int:
    """Return the bytes of the matrices of one rank, as they are in memory. Norms and biases are
    negligible and not counted."""
    from cbatch.runtime.model.shapes import num_weights
    from cbatch.runtime.model.sharding import head_rows

    quantised_bytes: int | None = getattr(model, "block_bytes", None)
    if quantised_bytes is not None:
        return quantised_bytes
    c = model.config
    count = num_weights(c)
    if not c.tie_embeddings:
        count += c.vocab_size * c.hidden_size
    count -= (c.vocab_size - head_rows(c, num_ranks(model))) * c.hidden_size
    return count * model.dtype.itemsize
