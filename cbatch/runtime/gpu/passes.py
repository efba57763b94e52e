"""The passes of an executor's models, each model over keys and values of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cbatch.runtime.gpu.attention import PagedAttention, Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.draft_pass import DraftPasses
from cbatch.runtime.gpu.kv_types import kv_scales
from cbatch.runtime.gpu.memory import StepLimits
from cbatch.runtime.gpu.target_pass import TargetPass
from cbatch.runtime.model.kv_cache import KVCache
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.state import SlotState


class PassBuilder(NamedTuple):
    """`kv_dtype` and `tuning` as `GpuExecutor` takes them; `layout` where anybody drafts."""

    limits: StepLimits
    num_blocks: int
    kv_dtype: torch.dtype | None
    tuning: Tuning | None
    state: SlotState
    layout: DraftLayout | None

    def of_draft(self, decoder: Decoder, vocab: int) -> tuple[DraftPasses, KVCache]:
        """`vocab`: tokens that the target knows."""
        assert self.layout is not None
        most_tokens = self.limits.most_catch_up
        kv, attention = self._memory(decoder, most_tokens)
        passes = DraftPasses(
            decoder,
            kv,
            attention,
            self.state,
            self.layout,
            most_tokens=most_tokens,
            most_positions=self.limits.max_sequence_tokens,
            most_drafts=self.limits.max_drafts,
            vocab=vocab,
        )
        return passes, kv

    def of_target(
        self, decoder: Decoder, drafting: DraftPasses | None
    ) -> tuple[TargetPass, KVCache]:
        most_tokens = self.limits.step_budget_tokens
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

    def _memory(self, decoder: Decoder, most_tokens: int) -> tuple[KVCache, PagedAttention]:
        """A model's pool, and its attention over it."""
        config, page_tokens = decoder.config, self.limits.block_size_tokens
        held, tuning = self.kv_dtype or decoder.dtype, self.tuning
        kv = KVCache(config, self.num_blocks, page_tokens, held, decoder.device)
        if tuning is None:
            tuning = self.limits.tuning_of(decoder, held)
        scales = kv_scales(decoder, held)
        return kv, PagedAttention(config, kv, self.state.blocks, most_tokens, tuning, scales)
