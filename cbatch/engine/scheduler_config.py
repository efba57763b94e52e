"""The configuration of the scheduler for loaded models, with the size of the KV cache."""

from __future__ import annotations

from pathlib import Path

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import parse_lookahead
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.info import total_weight_bytes, weight_bytes
from cbatch.engine.options import EngineOptions
from cbatch.engine.prices.shapes import MAX_PROFILED_DRAFTS
from cbatch.runtime.backend import LargestStep, LoadedModels
from cbatch.runtime.model.config import eos_ids_of
from cbatch.system.machine import mib


def scheduler_config(
    models: LoadedModels, options: EngineOptions, default_block_size: int, kv_events: bool
) -> SchedulerConfig:
    """Return the configuration for an engine's options. Raises `FieldError` for limits that the
    models or the memory do not allow."""
    target, draft = models.target, models.draft
    context = target.config.max_position_tokens
    max_tokens = options.max_model_len or context
    if max_tokens > context:
        problem = f"{max_tokens} is more than the model's context"
        raise FieldError("max_model_len", problem, f"use <= {context}")
    can_draft = draft is not None or options.drafter is not None
    lookahead = parse_lookahead(options.lookahead) if can_draft else LookaheadConfig()
    eos_ids = target.config.eos_token_ids
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        eos_ids = tuple(dict.fromkeys((*eos_ids, *eos_ids_of(Path(options.tokenizer)))))
    largest = LargestStep(
        max_num_seqs=options.max_num_seqs,
        max_sequence_tokens=max_tokens,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        block_size=options.block_size or default_block_size,
        max_drafts=0 if lookahead.policy == "off" else max(lookahead.k, MAX_PROFILED_DRAFTS),
    )
    block_bytes = models.kv_block_bytes(largest.block_size)
    num_blocks = _num_blocks(models, options, largest, block_bytes)
    needed = -(-max_tokens // largest.block_size)
    if options.max_model_len and num_blocks < needed:
        memory = mib(needed * block_bytes)
        raise FieldError(
            "num_blocks" if options.num_blocks is not None else "kv_cache_memory_bytes",
            f"{num_blocks} blocks cannot hold a sequence of {max_tokens} tokens",
            f"give {needed} blocks ({memory}) or more, or a smaller max_model_len",
        )
    fields = options.shared_with(SchedulerConfig) | {
        "num_blocks": num_blocks,
        "block_size": largest.block_size,
        "max_model_len": max_tokens,
        "max_num_batched_tokens": largest.max_num_batched_tokens,
        "prompt_share": 1.0 if options.prompt_share is None else options.prompt_share,
        "lookahead": lookahead,
    }
    return SchedulerConfig(
        **fields,
        vocab_size=target.config.vocab_size,
        eos_ids=eos_ids,
        queue_policy=options.scheduling_policy,
        kv_events=kv_events,
        draft_context_tokens=draft.config.max_position_tokens if draft is not None else None,
        # Cost of a draft token relative to a target token, estimated from the sizes of the weights.
        catch_up_price=1.0
        if draft is None
        else min(weight_bytes(draft) / weight_bytes(target, models.num_ranks), 1.0),
    )


def _num_blocks(
    models: LoadedModels, options: EngineOptions, largest: LargestStep, block_bytes: int
) -> int:
    """Return `options.num_blocks`, or the number of blocks that fit
    `options.kv_cache_memory_bytes`. By default return enough blocks for all slots at full length,
    or fewer if the memory for KV is smaller."""
    if options.num_blocks is not None:
        return options.num_blocks
    if options.kv_cache_memory_bytes is not None:
        if options.kv_cache_memory_bytes < block_bytes:
            remedy = f"give at least {block_bytes} bytes ({block_bytes / 2**30:.2g} GiB)"
            raise FieldError("kv_cache_memory_bytes", "does not hold one block", remedy)
        return options.kv_cache_memory_bytes // block_bytes
    full_slots = options.max_num_seqs * -(-largest.max_sequence_tokens // largest.block_size)
    share = options.gpu_memory_utilization
    kv_bytes = models.kv_memory_bytes(largest, share, total_weight_bytes(models))
    if kv_bytes <= 0:
        problem = f"weights and buffers need more than {share} of the memory"
        raise FieldError("gpu_memory_utilization", problem, "give a larger share")
    return max(1, min(full_slots, kv_bytes // block_bytes))


def allowed_drafters(config: SchedulerConfig) -> tuple[str, ...]:
    """Return the drafters that requests may choose; none if speculation is off."""
    if not config.default_chain:
        return ()
    return DRAFTERS if config.draft_context_tokens is not None else LOOKUPS
