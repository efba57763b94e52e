"""Attention over paged KV for a ragged batch: prefill chunks, decodes and verifications at once.

One kernel serves them all in one launch. With fixed parts (see `work_items`) it is batch-invariant:
a row's bits depend on its own keys only, not on the length of its query, the other sequences, or
the assignment of work to programs. So a token verified among k drafts gets the bits of plain
decoding.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.attention.kernel import attention_kernel
from triton_kernels.attention.reference import attention_reference
from triton_kernels.attention.table import arch_of, resident_programs, tile_for
from triton_kernels.attention.work_items import (
    Heads,
    Partials,
    Tile,
    WorkList,
    balanced_partials,
    block_tokens,
    plan,
)
from triton_kernels.build.check import check_tensor
from triton_kernels.build.hopper import is_hopper, launch_options

__all__ = [
    "Heads",
    "Partials",
    "Tile",
    "WorkList",
    "arch_of",
    "attention",
    "attention_reference",
    "balanced_partials",
    "block_tokens",
    "plan",
    "resident_programs",
    "tile_for",
]

MAX_ELEMENTS = 1 << 31  # elements of a pool must be fewer: its offsets are 32 bits wide
_LOG2_E = math.log2(math.e)


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    out: Tensor,
    work: WorkList,
    *,
    scale: float,
    first_key: int = 0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_programs: int,
    early: bool = False,
) -> None:
    """Write the attention output of a step's tokens, whose K and V are in the pool, to `out`.

    - q [T, kv_heads, group, head_dim]: the heads of a group are contiguous, other strides are free.
    - k_pages, v_pages [pages, page_tokens, kv_heads, head_dim]: equal strides, multiples of 16. Of
      q's type or fp8; fp8 values are multiplied by `k_scale` and `v_scale`.
    - block_tables int32 [B, blocks]: entries outside a sequence's context or window are not read.
    - out [T, kv_heads * group * head_dim]: contiguous rows. Rows of queries whose length `work`
      excludes are not written.
    - work: filled by `plan` for this step.

    Scores are `scale` q k with `scale` > 0, then `soft_cap` tanh(score / `soft_cap`). `sinks` fp32
    [kv_heads * group] has one more score of each head, without a value. No query sees keys before
    position `first_key`. `num_programs`: launched programs, those that fit on the
    device (`resident_programs`). Tiles with descriptors read whole pages, so unused slots of a page
    must be finite. `early` is that of `launch_options`: `work` and `block_tables` are read before
    the previous kernel ends. Raises ValueError naming the argument that does not fit.
    """
    _check(q, k_pages, v_pages, block_tables, out, work)
    heads, tile = work.heads, work.tile
    if sinks is not None:
        check_tensor("sinks", sinks, torch.float32, (heads.kv_heads * heads.group,))
    k, v = (_described(p, tile) if tile.descriptors else p for p in (k_pages, v_pages))
    early = early and is_hopper()
    attention_kernel[(min(num_programs, len(work.items) * heads.kv_heads),)](
        q, k, v, block_tables, sinks, out, work.items, work.num_items,
        work.partials.sums, work.partials.stats, work.partials.arrived,
        scale * k_scale * _LOG2_E, v_scale,
        q.stride(0), q.stride(1), *k_pages.stride()[:3], block_tables.stride(0), out.stride(0),
        KV_HEADS=heads.kv_heads, GROUP=heads.group, HEAD_DIM=heads.head_dim,
        BLOCK_DIM=triton.next_power_of_2(heads.head_dim), PAGE=k_pages.shape[1],
        ROWS=tile.rows, KEYS=tile.keys, SPLIT=work.split_tokens, FOLDS=work.balanced is None,
        FIRST=first_key, WINDOW=work.window, SOFT_CAP=soft_cap, DESCRIPTORS=tile.descriptors,
        EARLY=early,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        **launch_options(early),
        # Without a register limit NVIDIA's assembler aims at a higher occupancy, and spills.
        **({} if torch.version.hip else {"maxnreg": tile.max_registers}),
    )  # fmt: skip


def _described(pages: Tensor, tile: Tile) -> TensorDescriptor:
    """Return the TMA descriptor of the pool, for tiles of one head's keys."""
    block = [1, 1, tile.keys, triton.next_power_of_2(pages.shape[3])]
    return TensorDescriptor.from_tensor(pages.transpose(1, 2), block)


def _check(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, out: Tensor, work: WorkList
) -> None:
    heads = work.heads
    if q.dim() != 4 or tuple(q.shape[1:]) != heads:
        raise ValueError(f"q: {list(q.shape)} does not fit; give [T, {', '.join(map(str, heads))}]")
    if len(q) > work.max_tokens:
        raise ValueError(f"q: {len(q)} tokens, work for {work.max_tokens}")
    if q.stride(3) != 1 or q.stride(2) != heads.head_dim:
        raise ValueError("q: the heads of a group must lie side by side")
    width = heads.kv_heads * heads.group * heads.head_dim
    if tuple(out.shape) != (len(q), width) or out.stride(1) != 1 or out.dtype != q.dtype:
        raise ValueError(
            f"out: {out.dtype} {list(out.shape)} does not fit; give {q.dtype} {[len(q), width]}"
        )
    pool = (heads.kv_heads, heads.head_dim)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dim() != 4 or tuple(pages.shape[2:]) != pool:
            raise ValueError(
                f"{name}: {list(pages.shape)} does not fit; give [pages, page_tokens, "
                f"{heads.kv_heads}, {heads.head_dim}]"
            )
        if pages.stride() != k_pages.stride() or pages.shape != k_pages.shape:
            raise ValueError(f"{name}: its shape and strides differ from those of k_pages")
        if pages.stride(3) != 1 or any(s % 16 for s in pages.stride()[:3]):
            raise ValueError(f"{name}: strides {pages.stride()}; give multiples of 16, then 1")
        if pages.dtype != q.dtype and pages.itemsize != 1:
            raise ValueError(f"{name}: {pages.dtype}; give {q.dtype} or an fp8 type")
        if len(pages) * pages.stride(0) >= MAX_ELEMENTS:
            raise ValueError(f"{name}: 2**31 elements or more; make the pool of a layer smaller")
    page_tokens, tile = k_pages.shape[1], work.tile
    if tile.descriptors and page_tokens % tile.keys:
        raise ValueError(f"k_pages: pages of {page_tokens} tokens; give multiples of {tile.keys}")
    if page_tokens < 16 or page_tokens & (page_tokens - 1):
        raise ValueError(f"k_pages: pages of {page_tokens} tokens; give 16, 32, 64 or 128")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2:
        raise ValueError(f"block_tables: {block_tables.dtype}; give torch.int32 [B, blocks]")
    if block_tables.stride(1) != 1:
        raise ValueError("block_tables: the entries of a row must lie side by side")
