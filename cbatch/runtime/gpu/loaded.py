"""Loading of models on a GPU, with the properties and methods that an engine uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.runtime.backend import Impl, LargestStep, LoadRequest
from cbatch.runtime.drafting.heads.loading import load_head
from cbatch.runtime.drafting.lookups import all_lookups
from cbatch.runtime.gpu.capture import groups_of
from cbatch.runtime.gpu.decoder import Decoder, load_decoder
from cbatch.runtime.gpu.device import current
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.heads import CLASSES, GpuHead
from cbatch.runtime.gpu.host_drafts import LookupSettings
from cbatch.runtime.gpu.memory import Draft, StepLimits, check_pool, kv_dtype_of, step_memory_bytes
from cbatch.runtime.gpu.modelling import OneCall, load_modelling_decoder
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.sampling.structured import GrammarSource
from cbatch.runtime.state_memory import slot_bytes
from cbatch.system.machine import mib

KV_SHARE = 0.85  # default share of the KV cache in the memory that weights and steps leave free


class GpuModels:
    """A target and its draft. `kv_cache_dtype` is the engine's option."""

    num_ranks = 1

    def __init__(self, target: Decoder, draft: Draft | None, kv_cache_dtype: str) -> None:
        self.target, self.draft = target, draft
        self._kv_cache_dtype = kv_cache_dtype

    @property
    def code(self) -> str:
        return self.target.code

    @property
    def price_key(self) -> dict[str, object]:
        return {"compiled": None, "processor": torch.cuda.get_device_name(self.target.device)}

    def kv_block_bytes(self, block_size: int) -> int:
        size = 0
        for model in (self.target, self.draft):
            if model is not None:
                dtype = kv_dtype_of(model, self._kv_cache_dtype)
                size += KVCache.block_bytes(model.config, block_size, dtype)
        if isinstance(self.draft, GpuHead):  # it stores a state per block, too
            size += self.draft.state_bytes
        return size

    def state_bytes(self, block_size: int, max_drafts: int) -> tuple[int, int]:
        config = self.target.config
        return config.state_page_bytes, slot_bytes(config, block_size, max_drafts)

    def kv_memory_bytes(self, step: LargestStep, share: float | None, weight_bytes: int) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.target.device)
        limits = StepLimits.of(self.draft, *step)
        step_bytes = step_memory_bytes(self.target, self.draft, limits)
        if step_bytes >= free_bytes:
            raise FieldError(
                "max_num_seqs",
                f"steps need {mib(step_bytes)}, and the weights leave {mib(free_bytes)}",
                "use fewer slots, a smaller max_num_batched_tokens or max_model_len",
            )
        rest_bytes = free_bytes - step_bytes
        if share is None:
            return int(rest_bytes * KV_SHARE)
        return int(rest_bytes - (1 - share) * total_bytes)

    def batch_invariance(self) -> tuple[bool, str]:
        mode = self.target.numerics
        if mode != "invariant":
            return False, f"batch_invariant: no (numerics={mode}; products of a library)"
        holds = self.target.keeps_bits()
        reason = "" if holds else "; products on this device are not batch-invariant"
        answer = "yes" if holds else "no"
        return holds, f"batch_invariant: {answer} (numerics=invariant; fixed tiles{reason})"

    def executor(
        self,
        config: SchedulerConfig,
        max_drafts: int,
        grammars: GrammarSource | None = None,
        default_params: SamplingParams | None = None,
    ) -> GpuExecutor:
        """Create the executor, compile kernels and capture graphs; see `LoadedModels.executor`."""
        for model in filter(None, (self.target, self.draft)):
            check_pool(model.config, config.num_blocks, config.block_size)
        lookups = LookupSettings(all_lookups(), config.default_chain)
        executor = GpuExecutor(
            self.target,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_sequence_tokens=config.max_sequence_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            draft=self.draft if max_drafts else None,
            max_drafts=max_drafts,
            lookups=lookups if max_drafts else None,
            grammars=grammars,
            eos_ids=config.eos_ids,
            kv_dtype=kv_dtype_of(self.target, self._kv_cache_dtype),
            num_state_pages=config.num_state_pages,
        )
        executor.capture(groups_of(default_params or SamplingParams()))
        return executor


def load_models(request: LoadRequest) -> GpuModels:
    """Load a target and its draft; see `Backend.load`."""
    with current(torch.device(request.device)):  # tests of models and heads launch kernels
        target, kv_dtype = _load(request.model, request.impls[0], request), request.kv_cache_dtype
        if request.draft is None:
            return GpuModels(target, None, kv_dtype)
        if not request.trial_texts:
            return GpuModels(target, _load(request.draft, request.impls[1], request), kv_dtype)
        head = load_head(request, target, OneCall(target), CLASSES)
        return GpuModels(target, head, kv_dtype)


def _load(path: str | Path, impl: Impl, request: LoadRequest) -> Decoder:
    names = "dtype", "device", "numerics", "random_weights_seed"
    settings: Any = {name: getattr(request, name) for name in names}
    if impl == "transformers":  # it has the interface of a `Decoder`
        return cast("Decoder", load_modelling_decoder(path, **settings))
    return load_decoder(path, **settings)
