"""Attention of transformers' models on a CPU: by our kernels, or by torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled.layer_attention import (
    AttentionStep,
    CompiledAttention,
    LayerAttention,
)
from cbatch.runtime.cpu.torch_attention import TorchStep, attend, plan_step
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.transformers_backend.step import AttentionLayer, Pass


class CpuStep(NamedTuple):
    """The attention of a step."""

    step: AttentionStep | TorchStep
    kv: KVCache

    def compute(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as `LayerStep.compute` does."""
        if isinstance(self.step, AttentionStep):
            return self.step.attend(layer.prepared, self.kv.block_rows[layer.index], q, k, v)
        return attend(layer.mixer, layer.sinks, self.step, self.kv, layer.index, q, k, v)


class CpuAttention:
    """Attention of one model, whose layers are known."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        """Prepare our kernels if they can be compiled and support all layers."""
        self._kernels: CompiledAttention | None = None
        try:
            for layer in layers:
                layer.prepared = LayerAttention(layer.mixer, layer.sinks)
            self._kernels = CompiledAttention()
        except ValueError:
            pass

    def begin(self, owner: Pass, batch: RaggedBatch, kv: KVCache) -> AbstractContextManager[object]:
        """Prepare what the layers of a pass over `batch` share; the pass runs inside the context.
        Raises IndexError if block tables do not hold the context."""
        lens, tables = (batch.query_lens, batch.context_lens), batch.block_tables
        if self._kernels is None or kv.block_rows[0].dtype not in (torch.float32, torch.bfloat16):
            owner.step = CpuStep(plan_step(*lens, tables, kv.block_size), kv)
            return nullcontext()
        blocks, size = kv.num_blocks + 1, kv.block_size
        step = self._kernels.step(*lens, tables, num_blocks=blocks, block_size=size)
        owner.step = CpuStep(step, kv)
        return step
