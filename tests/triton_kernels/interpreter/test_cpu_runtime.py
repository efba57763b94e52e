"""The kernels give what the CPU runtime gives, over the CPU runtime's own pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cbatch.runtime.config import ModelConfig, RopeConfig
from cbatch.runtime.groups import StepBuffers
from cbatch.runtime.kv import KVCache
from cbatch.runtime.layout import AttentionPlanner
from tests.triton_kernels.interpreter.steps import Step
from triton_kernels.attention import Heads

HEADS = Heads(kv_heads=2, group=2, head_dim=16)
PAGE_TOKENS, SPARE_ROWS = 16, 8


def config(window: int | None) -> ModelConfig:
    kv_heads, group, head_dim = HEADS
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=8,
        max_position_tokens=512,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        sliding_window=(window,),
        tie_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


@torch.inference_mode()
def cpu_attention(step: Step, kv: KVCache, window: int | None) -> torch.Tensor:
    """[T, kv_heads, group, head_dim]; its queries come scaled."""
    rows = len(step.q)
    width = HEADS.kv_heads * (HEADS.group + 2) * HEADS.head_dim
    fused = torch.zeros(rows + SPARE_ROWS, width)
    fused[:rows].view(rows, HEADS.kv_heads, -1, HEADS.head_dim)[:, :, : HEADS.group] = (
        step.q * step.scale
    )
    out = torch.zeros(rows + 1, HEADS.kv_heads * HEADS.group * HEADS.head_dim)
    query_lens = step.starts.diff().numpy().astype(np.int64)
    contexts = step.contexts.numpy().astype(np.int64)
    positions = [np.arange(c - q, c) for q, c in zip(query_lens, contexts, strict=True)]
    buffers = StepBuffers(kv, step.tables.numpy(), fused[:rows], out)
    layout = AttentionPlanner(config(window)).plan(
        buffers, query_lens, contexts, np.concatenate(positions)
    )
    for group in layout.groups[window]:
        group.run(kv.block_rows[0])
    return out[:rows].view(step.q.shape)


@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_the_pool_of_the_cpu_runtime(window: int | None) -> None:
    made = Step.make([(1, 100), (5, 70), (20, 75), (1, 3)], HEADS, page_tokens=PAGE_TOKENS)
    num_blocks = len(made.k_pages)
    kv = KVCache(config(window), num_blocks, PAGE_TOKENS, torch.float32, "cpu")
    k_pages, v_pages = kv.data[0, :, :, :num_blocks].permute(0, 2, 3, 1, 4)
    k_pages.copy_(made.k_pages.nan_to_num())  # the CPU runtime keeps its pool finite
    v_pages.copy_(made.v_pages.nan_to_num())
    step = made._replace(k_pages=k_pages, v_pages=v_pages)
    found = step.run(step.work(window=window))
    assert torch.allclose(found, cpu_attention(step, kv, window), rtol=2e-6, atol=2e-6)
