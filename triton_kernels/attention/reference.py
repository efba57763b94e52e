"""Reference of attention over paged KV in plain torch, one sequence after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    first_key: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Compute `attention` after `plan`; returns fp32 [T, kv_heads, group, head_dim]."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    page_tokens = k_pages.shape[1]
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for b, context in enumerate(contexts):
        rows = slice(starts[b], starts[b + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        pages = block_tables[b, : -(-context // page_tokens)].long()
        k, v = (p[pages].flatten(0, 1)[:context].float() for p in (k_pages, v_pages))
        scores = torch.einsum("thgd,khd->thgk", q[rows].float(), k * k_scale) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(context - count, context, device=q.device)[:, None]
        keys = torch.arange(context, device=q.device)[None]
        visible = (keys <= positions) & (keys >= first_key)
        if window is not None:
            visible &= keys > positions - window
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        if sinks is not None:
            more = sinks.view(1, *q.shape[1:3], 1).expand(count, -1, -1, -1)
            scores = torch.cat([scores, more], dim=-1)
        weights = scores.softmax(-1).nan_to_num(0.0)  # NaN: a query that sees no key
        weights = weights[..., :context]
        out[rows] = torch.einsum("thgk,khd->thgd", weights, v * v_scale)
    return out
