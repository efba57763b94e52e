"""Builder of the target's and the draft's forward passes, each with a KV cache of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cbatch.runtime.gpu.attention import PagedAttention, Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.draft_pass import DraftPasses
from cbatch.runtime.gpu.head_pass import DeviceStates, EaglePasses, MedusaPasses
from cbatch.runtime.gpu.heads import FIRST_KEY, GpuEagleHead, GpuHead, GpuMedusaHead
from cbatch.runtime.gpu.kv_types import kv_scales
from cbatch.runtime.gpu.memory import Draft, StepLimits
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.kv_cache import KVCache
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.state import SlotState


class PassBuilder(NamedTuple):
    """Settings of both passes. `kv_dtype` and `tuning` are the arguments of `GpuExecutor`;
    `layout` is None without speculation."""

    limits: StepLimits
    num_blocks: int
    kv_dtype: torch.dtype | None
    tuning: Tuning | None
    state: SlotState
    layout: DraftLayout | None

    def of_draft(self, draft: Draft, vocab: int) -> tuple[DraftPasses, KVCache | None]:
        """Return the draft's passes and its KV cache, None for Medusa heads, which need none.
        `vocab` is the size of the target's vocabulary."""
        assert self.layout is not None
        limits, most_tokens = self.limits, self.limits.most_catch_up
        kv, attention, kind, more = None, None, DraftPasses, {}
        if isinstance(draft, GpuHead):
            kind = EaglePasses if isinstance(draft, GpuEagleHead) else MedusaPasses
            more["states"] = DeviceStates(
                draft,
                self.state,
                num_blocks=self.num_blocks,
                block_size=limits.block_size,
                most_tokens=limits.max_num_batched_tokens,
            )
        if not isinstance(draft, GpuMedusaHead):
            first_key = FIRST_KEY if isinstance(draft, GpuEagleHead) else 0
            kv, attention = self._memory(draft, most_tokens, first_key)
        passes = kind(
            draft,
            attention,
            self.state,
            self.layout,
            block_size=limits.block_size,
            most_tokens=most_tokens,
            most_positions=limits.max_sequence_tokens,
            most_drafts=limits.max_drafts,
            vocab=vocab,
            **more,
        )
        return passes, kv

    def of_target(
        self, decoder: Decoder, drafting: DraftPasses | None
    ) -> tuple[TargetPass, KVCache]:
        most_tokens = self.limits.max_num_batched_tokens
        kv, attention = self._memory(decoder, most_tokens)
        target = TargetPass(
            decoder,
            kv,
            attention,
            self.state,
            self.layout,
            drafting,
            most_tokens=most_tokens,
            most_positions=self.limits.max_sequence_tokens,
            most_drafts=self.limits.max_drafts,
        )
        return target, kv

    def _memory(
        self, decoder: Decoder | GpuEagleHead, most_tokens: int, first_key: int = 0
    ) -> tuple[KVCache, PagedAttention]:
        """Return a KV cache for a model, and the attention that reads it."""
        config, page_tokens = decoder.config, self.limits.block_size
        kv_dtype, tuning = self.kv_dtype or decoder.dtype, self.tuning
        kv = KVCache(config, self.num_blocks, page_tokens, kv_dtype, decoder.device)
        if tuning is None:
            tuning = self.limits.tuning_of(decoder, kv_dtype)
        scales = kv_scales(decoder, kv_dtype)
        tables = self.state.blocks
        return kv, PagedAttention(config, kv, tables, most_tokens, tuning, scales, first_key)
