"""Recurrent layers whose state is kept at block boundaries only: short convolutions, the gated
delta rule (arXiv:2412.06464) and Mamba-2's scan (arXiv:2405.21060).

With S the state at the last boundary, G_t the sum of log decays since then, and factors b:

    u_t = b_t (v_t - e^G_t S^T k_t - sum_{i<t} e^(G_t - G_i) (k_i . k_t) u_i)    by the delta rule
    u_t = b_t v_t                                                                by a scan
    o_t = e^G_t S^T q_t + sum_{i<=t} e^(G_t - G_i) (k_i . q_t) u_i

and after the last token T of a block: S = e^G_T S + sum_i e^(G_T - G_i) k_i u_i^T. Every sum runs
over tiles of a fixed size, from the block's start on. So a token's bits do not depend on its chunk,
and a rejected draft leaves nothing that is read later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from triton_kernels.build.check import check_tensor
from triton_kernels.recurrence.convolve import convolve_kernel, keep_kernel
from triton_kernels.recurrence.state import gate_kernel, recur_kernel

_BLOCK = 512  # channels of a program
_STATE_VALUES = 8192  # of a program, which holds them in registers
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_LARGEST = torch.finfo(torch.float32).max


class Sequences(NamedTuple):
    """The sequences of a pass. Those without rows compute nothing."""

    starts: Tensor  # int32 [S + 1]: the first row of each
    contexts: Tensor  # int32 [S]: its tokens after the pass
    pages: Tensor  # int32 [S, boundaries]: the page of its state after j blocks, or -1
    slots: Tensor  # int32 [S]: the slot that keeps its entries


def recur(
    rows: Tensor, m: Any, weights: Any, memory: Any, sequences: Sequences, page_tokens: int
) -> Tensor:
    """Return the layer's output [T, inner] before its last projection, from the rows of the first.

    rows [T, n], adjacent: with a convolution [gates before, gates after, inputs], with the delta
    rule [queries, keys, values, gates, factors, rates], with a scan [gates, values, keys, queries,
    rates]. `m`, `weights` and `memory` are a `Recurrence`, `RecurrenceWeights` and `LayerStates` of
    cbatch.runtime. What later passes need is kept in `memory`; a place of a ring is `position %
    ring`. Rows of padding, after those of the last sequence, are left uninitialised. Raises
    ValueError naming the argument that does not fit."""
    _check(rows, m, memory, sequences, page_tokens)
    delta, keys, inner, count = m.rule == "delta", m.key_heads * m.key_dim, m.inner, len(rows)
    if not count:
        return rows.new_empty(0, inner)
    keys_at = keys if delta else inner
    ring, stride, convolves = memory.inputs.shape[1], rows.stride(0), not m.key_dim
    num_sequences, table_width = sequences.pages.shape
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    common = {
        "INNER": inner, "WIDTH": memory.inputs.shape[2],
        "INPUTS": inner if m.rule == "scan" else 0,
        "BLOCK_SEQUENCES": triton.next_power_of_2(num_sequences), **options,
    }  # fmt: skip
    block = triton.next_power_of_2(m.key_dim or _BLOCK)
    mixed = rows.new_empty(count, m.channels, dtype=rows.dtype if convolves else torch.float32)
    convolve_kernel[(count, 2 * m.key_heads + triton.cdiv(inner, block))](
        rows, mixed, weights.conv, weights.conv_bias, sequences, memory, num_sequences, stride,
        table_width, ring, RULE=m.rule, KEY_HEADS=m.key_heads, KEY_DIM=m.key_dim, KERNEL=m.kernel,
        PAGE=page_tokens, BLOCK=block, **common,
    )  # fmt: skip
    out, totals = mixed, None
    if not convolves:
        out, totals = rows.new_empty(count, inner), mixed.new_empty(count, m.heads)
        read = mixed.new_empty(count, inner)
        block_key, block_value = (
            triton.next_power_of_2(max(size, 16)) for size in (m.key_dim, m.value_dim)
        )
        block_value = min(block_value, max(_STATE_VALUES // block_key, 16))
        recur_kernel[(m.heads, triton.cdiv(m.value_dim, block_value), num_sequences)](
            rows, mixed, read, totals, weights.decay, weights.step_bias, weights.skip, sequences,
            memory, stride, table_width, ring, m.min_step, min(m.max_step, _LARGEST), DELTA=delta,
            HEADS=m.heads, KEY_HEADS=m.key_heads, KEY_DIM=m.key_dim, VALUE_DIM=m.value_dim,
            ROW=m.channels, KEYS_AT=keys_at, QUERIES_AT=0 if delta else inner + keys,
            RATES_AT=m.channels + inner, KEY_WIDTH=memory.keys.shape[2],
            WIDTH=memory.values.shape[3], PAGE=page_tokens,
            GROUP=1 if m.tiled else m.heads // m.key_heads, BLOCK_KEY=block_key,
            BLOCK_VALUE=block_value, **options,
        )  # fmt: skip
        parts = m.heads if delta else m.groups
        gate_kernel[(count, parts)](
            rows, read, weights.norm, out, stride, m.norm_eps, DELTA=delta, PARTS=parts,
            WIDTH=inner // parts, GATES_AT=m.channels if delta else 0,
            BLOCK=triton.next_power_of_2(inner // parts), **options,
        )  # fmt: skip
    keep_kernel[(count, triton.cdiv(m.channels, _BLOCK))](
        rows, mixed, totals, sequences, memory, num_sequences, stride, ring, HEADS=m.heads,
        KEYS=keys, KEYS_AT=keys_at, KEY_WIDTH=memory.keys.shape[2],
        GATES=convolves, BLOCK=_BLOCK, BLOCK_HEADS=triton.next_power_of_2(m.heads), **common,
    )  # fmt: skip
    return out


def _check(rows: Tensor, m: Any, memory: Any, sequences: Sequences, page_tokens: int) -> None:
    fits = rows.dim() == 2 and rows.shape[1] == m.row_width and rows.stride(1) == 1
    if not fits or rows.dtype not in _DTYPES:
        raise ValueError(
            f"rows: {rows.dtype} {list(rows.shape)}; give fp32, bf16 or fp16 [T, {m.row_width}], "
            "elements side by side"
        )
    if page_tokens < 16 or page_tokens & (page_tokens - 1) or memory.inputs.shape[1] % page_tokens:
        raise ValueError(f"page_tokens: {page_tokens}; give 16, 32, 64 or 128, in whole rings")
    count = len(sequences.contexts)
    check_tensor("sequences.starts", sequences.starts, torch.int32, (count + 1,))
    check_tensor("sequences.contexts", sequences.contexts, torch.int32, (count,))
    check_tensor("sequences.pages", sequences.pages, torch.int32, (count, None))
    check_tensor("sequences.slots", sequences.slots, torch.int32, (count,))
