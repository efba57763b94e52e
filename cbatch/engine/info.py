"""Description of an engine's loaded models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import lookahead_name
from cbatch.runtime.backend import LoadedModels, ModelFacts
from cbatch.runtime.model.config import GENERATION_FILE
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
    kv_cache_memory_bytes: int  # of blocks and state pages
    max_model_len: int
    num_threads: int  # CPU threads of each rank
    ranks: int = 1  # number of tensor-parallel ranks
    code: str = "our own"  # the modelling code in use
    num_state_pages: int = 0  # of recurrent layers
    sampling_defaults: dict[str, float | int] = {}  # `SamplingParams` fields in the model's files

    def lines(self) -> list[str]:
        draft = f", draft {self.draft}" if self.draft else ""
        drafters = f" by {', '.join(self.drafter)}" if self.drafter not in ((), (MODEL,)) else ""
        lookahead = self.lookahead + drafters
        defaults = ", ".join(f"{name} {value}" for name, value in self.sampling_defaults.items())
        shared = f" in {self.ranks} ranks" if self.ranks > 1 else ""
        pages = f", {self.num_state_pages} state pages" if self.num_state_pages else ""
        factor = f"{self.ranks} x " if self.ranks > 1 else ""
        return [
            f"model {self.model}{draft}: {self.dtype} on {self.device}{shared}, "
            f"lookahead {lookahead}",
            f"code: {self.code}",
            self.batch_invariance,
            f"KV: {self.num_blocks} blocks of {self.block_size} tokens{pages}, "
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
    page_bytes = models.state_bytes(config.block_size, 0)[0]
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
        kv_cache_memory_bytes=config.num_blocks * models.kv_block_bytes(config.block_size)
        + config.num_state_pages * page_bytes,
        num_state_pages=config.num_state_pages,
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
    if c.layer_inputs is not None:  # their table
        count += c.vocab_size * c.num_layers * c.layer_inputs.width
    count -= (c.vocab_size - head_rows(c, num_ranks)) * c.hidden_size
    return count * model.dtype.itemsize
