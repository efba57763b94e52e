"""Attention over paged KV by torch: used if our kernels cannot be compiled, and to test them.

The bits of a row depend on the number of rows that its sequence has in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import KVShape
from cbatch.runtime.transformers_backend.step import AttentionLayer


class TorchStep(NamedTuple):
    """A planned step. K and V of row t are written to `blocks[t]`, at `offsets[t]`. `lens`,
    `contexts` and `tables` have one entry per sequence."""

    lens: list[int]
    contexts: list[int]
    tables: list[Tensor]
    blocks: Tensor
    offsets: Tensor


def plan_step(
    query_lens: np.ndarray, context_lens: np.ndarray, tables: np.ndarray, block_size: int
) -> TorchStep:
    lens, contexts = query_lens.tolist(), context_lens.tolist()
    own_tables, blocks, offsets = [], [], []
    for n, context, table in zip(lens, contexts, tables, strict=True):
        positions = np.arange(context - n, context)
        own_tables.append(torch.from_numpy(table[: -(-context // block_size)].astype(np.int64)))
        blocks.append(table[positions // block_size])
        offsets.append(positions % block_size)
    flat = (torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in (blocks, offsets))
    return TorchStep(lens, contexts, own_tables, *flat)


def attend(
    layer: AttentionLayer, step: TorchStep, kv: KVCache, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Write K [Hkv, T, Dk] and V [Hkv, T, Dv]; return fp32 [T, H, Dv] for queries [H, T, Dk]."""
    keys, values = _views(kv, layer.index, layer.kv)
    keys[:, step.blocks, step.offsets] = k.to(keys.dtype)
    values[:, step.blocks, step.offsets] = v.to(values.dtype)
    out, at = q.new_empty(q.shape[1], q.shape[0], layer.kv.value_dim, dtype=torch.float32), 0
    for n, context, table in zip(step.lens, step.contexts, step.tables, strict=True):
        own_k = keys[:, table].flatten(1, 2)[:, :context].float()
        own_v = values[:, table].flatten(1, 2)[:, :context].float()
        rows = q[:, at : at + n].float()
        out[at : at + n] = _sequence(layer, rows, own_k, own_v).transpose(0, 1)
        at += n
    return out


def _views(kv: KVCache, layer: int, shape: KVShape) -> tuple[Tensor, Tensor]:
    rows = kv.block_rows[layer].view(shape.heads, kv.num_blocks + 1, -1)
    split = kv.block_size * shape.key_dim
    keys = rows[..., :split].unflatten(-1, (kv.block_size, shape.key_dim))
    return keys, rows[..., split:].unflatten(-1, (kv.block_size, shape.value_dim))


def _sequence(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.matmul(q, k.transpose(1, 2)) * layer.scale
    if layer.softcap:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    n, context = q.shape[1], k.shape[1]
    queries, keys = torch.arange(context - n, context)[:, None], torch.arange(context)
    hidden = keys > queries
    if layer.window is not None:
        hidden |= queries - keys >= layer.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is None:
        return torch.matmul(torch.softmax(scores, -1), v)
    sinks = layer.sinks.view(-1, 1, 1).expand(-1, n, 1)
    return torch.matmul(torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1], v)
