"""Attention over paged KV by torch: used if our kernels cannot be compiled, and to test them.

The bits of a row depend on the number of rows that its sequence has in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.records import Attention


class TorchStep(NamedTuple):
    """A planned step. K and V of row t, at `positions[t]`, are written to `blocks[t]`, at
    `offsets[t]`. `lens`,
    `contexts` and `tables` have one entry per sequence."""

    lens: list[int]
    contexts: list[int]
    tables: list[Tensor]
    positions: Tensor
    blocks: Tensor
    offsets: Tensor


def plan_step(
    query_lens: np.ndarray, context_lens: np.ndarray, tables: np.ndarray, block_size: int
) -> TorchStep:
    lens, contexts = query_lens.tolist(), context_lens.tolist()
    own_tables, all_positions, blocks, offsets = [], [], [], []
    for n, context, table in zip(lens, contexts, tables, strict=True):
        positions = np.arange(context - n, context)
        own_tables.append(torch.from_numpy(table[: -(-context // block_size)].astype(np.int64)))
        all_positions.append(positions)
        blocks.append(table[positions // block_size])
        offsets.append(positions % block_size)
    rows = all_positions, blocks, offsets
    flat = (torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in rows)
    return TorchStep(lens, contexts, own_tables, *flat)


def attend(
    mixer: Attention,
    sinks: Tensor | None,
    step: TorchStep,
    kv: KVCache,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: int = 0,
) -> Tensor:
    """Write K [Hkv, T, Dk] and V [Hkv, T, Dv], unless they are another layer's; return fp32
    [T, H, Dv] for queries [H, T, Dk]. Leading dimensions of 1 are ignored. No query sees positions
    before `first_key`."""
    q, k, v = (x.reshape(x.shape[-3:]) for x in (q, k, v))
    keys, values = _views(kv, layer, mixer)
    if mixer.kv_from is None:
        keys[:, step.blocks, step.offsets] = k.to(keys.dtype)
        values[:, step.blocks, step.offsets] = v.to(values.dtype)
    out, at = q.new_empty(q.shape[1], q.shape[0], mixer.value_dim, dtype=torch.float32), 0
    for n, context, table in zip(step.lens, step.contexts, step.tables, strict=True):
        own_k = keys[:, table].flatten(1, 2)[:, :context].float()
        own_v = values[:, table].flatten(1, 2)[:, :context].float()
        rows = q[:, at : at + n].float()
        out[at : at + n] = _sequence(mixer, sinks, rows, own_k, own_v, first_key).transpose(0, 1)
        at += n
    return out


def _views(kv: KVCache, layer: int, shape: Attention) -> tuple[Tensor, Tensor]:
    rows = kv.block_rows[layer].view(shape.kv_heads, kv.num_blocks + 1, -1)
    split = kv.block_size * shape.key_dim
    keys = rows[..., :split].unflatten(-1, (kv.block_size, shape.key_dim))
    return keys, rows[..., split:].unflatten(-1, (kv.block_size, shape.value_dim))


def _sequence(
    mixer: Attention, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor, first_key: int
) -> Tensor:
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.matmul(q, k.transpose(1, 2)) * mixer.scale
    if mixer.soft_cap:
        scores = torch.tanh(scores / mixer.soft_cap) * mixer.soft_cap
    n, context = q.shape[1], k.shape[1]
    queries, keys = torch.arange(context - n, context)[:, None], torch.arange(context)
    hidden = (keys > queries) | (keys < first_key)
    if mixer.window is not None:
        hidden |= queries - keys >= mixer.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        # A query without keys gets zeros, not NaN.
        weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        return torch.matmul(weights, v)
    sinks = sinks.view(-1, 1, 1).expand(-1, n, 1)
    return torch.matmul(torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1], v)
