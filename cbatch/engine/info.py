"""Description of an engine's loaded models, and the configuration of its scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS, MODEL
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.options import EngineOptions
from cbatch.engine.prices.startup import MAX_PROFILED_DRAFTS
from cbatch.runtime.backend import LargestStep, LoadedModels, ModelFacts
from cbatch.runtime.model.config import GENERATION_FILE, eos_ids_of
from cbatch.runtime.model.gguf_file import SUFFIX
from cbatch.runtime.model.shapes import head_rows, num_weights
from cbatch.system.machine import mib


class EngineInfo(msgspec.Struct, frozen=True):
    """Description of an engine, for a log or a report."""

    model: str
    draft: str | None
    dtype: str
    device: str
    numerics: str
    batch_invariant: bool  # results of a row do not depend on the batch
    batch_invariance: str  # `batch_invariant` as a sentence, with the kernels in use
    lookahead: str
    drafter: tuple[str, ...]  # default drafters, preferred first; (): no drafting
    weight_bytes: int  # of target and draft, in all ranks
    num_blocks: int
    block_size: int
    kv_cache_memory_bytes: int
    max_model_len: int
    num_threads: int  # CPU threads of each rank
    ranks: int = 1  # number of tensor-parallel ranks
    code: str = "our own"  # the modelling code in use
    sampling_defaults: dict[str, float | int] = {}  # `SamplingParams` fields in the model's files

    def lines(self) -> list[str]:
        draft = f", draft {self.draft}" if self.draft else ""
        drafters = f" by {', '.join(self.drafter)}" if self.drafter not in ((), (MODEL,)) else ""
        lookahead = self.lookahead + drafters
        defaults = ", ".join(f"{name} {value}" for name, value in self.sampling_defaults.items())
        shared = f" in {self.ranks} ranks" if self.ranks > 1 else ""
        factor = f"{self.ranks} x " if self.ranks > 1 else ""
        return [
            f"model {self.model}{draft}: {self.dtype} on {self.device}{shared}, "
            f"lookahead {lookahead}",
            f"code: {self.code}",
            self.batch_invariance,
            f"KV: {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{mib(self.kv_cache_memory_bytes)}; {self._context()}",
            f"weights: {mib(self.weight_bytes)}; "
            f"engine threads: {factor}{self.num_threads} of {os.cpu_count()}",
            *([f"defaults of calls, by {self._defaults_from()}: {defaults}"] if defaults else ()),
        ]

    def _defaults_from(self) -> str:
        return "general.sampling" if Path(self.model).suffix == SUFFIX else GENERATION_FILE

    def _context(self) -> str:
        pool_tokens = self.num_blocks * self.block_size
        if pool_tokens >= self.max_model_len:
            return f"context {self.max_model_len} tokens"
        return (
            f"sequences of at most {pool_tokens} tokens, the size of the pool "
            f"(context {self.max_model_len})"
        )


def describe_engine(
    model: str | Path,
    draft: str | Path | None,
    models: LoadedModels,
    config: SchedulerConfig,
    defaults: dict[str, Any],
    invariance: tuple[bool, str],
) -> EngineInfo:
    import torch

    target, ranks = models.target, models.num_ranks
    return EngineInfo(
        model=str(model),
        draft=None if draft is None else str(draft),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        code=models.code,
        numerics=target.numerics,
        batch_invariant=invariance[0],
        batch_invariance=invariance[1],
        lookahead=lookahead_name(config.lookahead),
        drafter=config.default_chain,
        weight_bytes=total_weight_bytes(models),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        kv_cache_memory_bytes=config.num_blocks * models.kv_block_bytes(config.block_size),
        max_model_len=config.max_model_len,
        num_threads=torch.get_num_threads(),
        ranks=ranks,
        sampling_defaults=defaults,
    )


def total_weight_bytes(models: LoadedModels) -> int:
    draft_bytes = 0 if models.draft is None else weight_bytes(models.draft)
    return models.num_ranks * (weight_bytes(models.target, models.num_ranks) + draft_bytes)


def weight_bytes(model: ModelFacts, num_ranks: int = 1) -> int:
    """Return the bytes of one rank's weight matrices in memory. Norms and biases are negligible
    and not counted."""
    if model.matrix_bytes is not None:
        return model.matrix_bytes
    c = model.config
    count = num_weights(c)
    if not c.tie_embeddings:
        count += c.vocab_size * c.hidden_size
    count -= (c.vocab_size - head_rows(c, num_ranks)) * c.hidden_size
    return count * model.dtype.itemsize


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
    if not config.default_chain:
        return ()
    return DRAFTERS if config.draft_context_tokens is not None else LOOKUPS
