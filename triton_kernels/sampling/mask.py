"""Forbids tokens by bit masks; the host sends each mask with the place of its row of logits.

A forbidden token gets the least finite number of its type. Non-finite values stay as they are, so
that the scan finds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.jit import jit
from triton_kernels.sampling.order import lowest_of

HEAD_WORDS = 2  # slot, and number of drafts before the row
_HEAD = tl.constexpr(HEAD_WORDS)
BLOCK = 2048
NUM_WARPS = 4


@jit
def mask_kernel(
    rows_ptr, logits_ptr, starts_ptr, counts_ptr, vocab, stride, row_words, BLOCK: tl.constexpr
):  # fmt: skip
    rows_ptr += tl.program_id(0).to(tl.int64) * row_words
    slot, depth = tl.load(rows_ptr), tl.load(rows_ptr + 1)
    if depth < tl.load(counts_ptr + slot):
        row = tl.load(starts_ptr + slot) + depth
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        words = tl.load(rows_ptr + _HEAD + ids // 32, mask=inside, other=-1)
        at = logits_ptr + row.to(tl.int64) * stride + ids
        x = tl.load(at, mask=inside, other=0.0)
        forbidden = inside & ((words >> (ids % 32)) & 1 == 0)
        finite = tl.abs(x.to(tl.float32)) < float("inf")
        lowest = tl.full([BLOCK], lowest_of(logits_ptr.dtype.element_ty), tl.float32)
        tl.store(at, lowest.to(x.dtype), mask=forbidden & finite)


def words_of(vocab: int) -> int:
    """Return the number of words of a mask, including its head."""
    return HEAD_WORDS + triton.cdiv(vocab, 32)


def mask_logits(logits: Tensor, rows: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Forbid tokens in `logits` [N, V] by `rows` int32 [M, 2 + words]. A mask belongs to the row of
    slot s = rows[i, 0] that follows rows[i, 1] drafts; bit j % 32 of word j // 32 allows token j.
    Slot s has counts[s] rows of logits, from starts[s] on, both int32 [S]; masks of later rows are
    ignored. Raises ValueError naming the argument that does not fit."""
    vocab = logits.shape[1]
    if rows.dtype != torch.int32 or rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(f"rows: {rows.dtype} {list(rows.shape)}; give int32 [M, 2 + words]")
    if rows.shape[1] != words_of(vocab):
        raise ValueError(f"rows: {rows.shape[1]} words do not hold bits of {vocab} tokens")
    if len(rows):
        mask_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
            rows, logits, starts, counts, vocab, logits.stride(0), rows.shape[1], BLOCK=BLOCK,
            num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip


def mask_reference(logits: Tensor, rows: Tensor, starts: Tensor, counts: Tensor) -> None:
    lowest = torch.finfo(logits.dtype).min
    ids = torch.arange(logits.shape[1])
    for slot, depth, *words in rows.tolist():
        if depth < counts[slot]:
            row = logits[int(starts[slot]) + depth]
            bits = torch.tensor(words)[ids // 32] >> (ids % 32) & 1
            row[(bits == 0) & row.isfinite()] = lowest
