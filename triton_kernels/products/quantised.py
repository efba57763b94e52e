"""x @ weight.T with weights of 4 or 8 bits, dequantised inside the kernel.

A weight is code * scale + offset, with an fp16 scale and offset for each 32 columns: the form of
GGUF's Q4_0, Q4_1 and Q8_0, and so of compressed-tensors, GPTQ and AWQ. The sum is rounded to the
type of x and multiplied as in `dense`: one tile size for any number of rows, one order of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.jit import jit

GROUP = 32
_GROUP = tl.constexpr(GROUP)
ROWS, OUTS, COLUMNS, NUM_WARPS = 64, 64, 64, 4


class Packed(NamedTuple):
    """A matrix [N, K]. With 4 bits, two columns share a byte, the first in its low half."""

    codes: Tensor  # uint8 [N, K / 2], or int8 [N, K]
    scales: Tensor  # fp16 [N, K / 32]
    offsets: Tensor | None  # fp16 [N, K / 32]; None: -8 scales with 4 bits, 0 with 8 bits

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), self.scales.shape[1] * GROUP

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


@jit
def _restored(codes_ptr, at, valid, PAIRS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the codes of a tile, fp32 [OUTS, COLUMNS]."""
    if PAIRS:
        columns = tl.arange(0, COLUMNS // 2)[None, :]
        pairs = tl.load(codes_ptr + at // 2 + columns, mask=valid, other=0)
        codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), [OUTS, COLUMNS])
    else:
        columns = tl.arange(0, COLUMNS)[None, :]
        codes = tl.load(codes_ptr + at + columns, mask=valid, other=0)
    return codes.to(tl.float32)


@jit(do_not_specialize=["num_rows"])
def quantised_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr, num_rows, num_outs, num_columns,
    stride_x, stride_out, PAIRS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the result. Tiles of one block of the weight are consecutive."""
    blocks = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    outs = (tl.program_id(0) // blocks) * OUTS + tl.arange(0, OUTS)
    columns, groups = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // _GROUP)
    row_valid, out_valid = (rows < num_rows)[:, None], (outs < num_outs)[:, None]
    x_at = x_ptr + rows[:, None].to(tl.int64) * stride_x + columns[None, :]
    weight_at = outs[:, None].to(tl.int64) * num_columns
    group_at = outs[:, None].to(tl.int64) * (num_columns // _GROUP) + groups[None, :]
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        x = tl.load(x_at, mask=row_valid, other=0.0)
        scales = tl.load(scales_ptr + group_at, mask=out_valid, other=0.0).to(tl.float32)
        codes = _restored(codes_ptr, weight_at + start, out_valid, PAIRS, OUTS, COLUMNS)
        codes = tl.reshape(codes, [OUTS, COLUMNS // _GROUP, _GROUP])
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + group_at, mask=out_valid, other=0.0).to(tl.float32)
            weight = codes * scales[:, :, None] + offsets[:, :, None]
        elif PAIRS:
            weight = (codes - 8.0) * scales[:, :, None]
        else:
            weight = codes * scales[:, :, None]
        weight = tl.reshape(weight, [OUTS, COLUMNS]).to(x.dtype)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        x_at += COLUMNS
        group_at += COLUMNS // _GROUP
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[None, :]
    valid = row_valid & (outs < num_outs)[None, :]
    out_at = out_ptr + rows[:, None].to(tl.int64) * stride_out + outs[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid)


def quantised(x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> None:
    """Compute `out` [T, N] = x [T, K] @ weight [N, K].T + bias [N], summed in fp32 and rounded
    once. `x` and `out` have one type, and their rows may be strided. Raises ValueError naming the
    argument that does not fit."""
    num_outs, num_columns = weight.shape
    pairs = weight.codes.dtype == torch.uint8
    if weight.codes.numel() * (2 if pairs else 1) != num_outs * num_columns:
        raise ValueError(f"weight.codes: {list(weight.codes.shape)} for {[num_outs, num_columns]}")
    if x.shape[1] != num_columns or x.stride(1) != 1:
        raise ValueError(f"x: {list(x.shape)}; give [T, {num_columns}], elements side by side")
    if num_columns % COLUMNS:
        raise ValueError(f"weight: {num_columns} columns; give a multiple of {COLUMNS}")
    if tuple(out.shape) != (len(x), num_outs) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out: {out.dtype} {list(out.shape)}; give {x.dtype} {[len(x), num_outs]}")
    if not len(x):
        return
    programs = triton.cdiv(len(x), ROWS) * triton.cdiv(num_outs, OUTS)
    quantised_kernel[(programs,)](
        x, weight.codes, weight.scales, weight.offsets, bias, out, len(x), num_outs, num_columns,
        x.stride(0), out.stride(0), PAIRS=pairs, ROWS=ROWS, OUTS=OUTS, COLUMNS=COLUMNS,
        num_warps=NUM_WARPS, num_stages=_num_stages(), enable_fp_fusion=False,
    )  # fmt: skip


def _num_stages() -> int:
    return 2 if torch.version.hip else 3


def restored(weight: Packed) -> Tensor:
    """Return the dequantised matrix, fp32 [N, K]."""
    codes = weight.codes
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    scales = weight.scales.float().repeat_interleave(GROUP, 1)
    if weight.offsets is not None:
        return codes.float() * scales + weight.offsets.float().repeat_interleave(GROUP, 1)
    return (codes.float() - (8 if weight.codes.dtype == torch.uint8 else 0)) * scales


def quantised_reference(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Compute `quantised` in plain torch, with another order of sums."""
    product = x.double() @ restored(weight).to(x.dtype).double().t()
    return (product if bias is None else product + bias.double()).to(x.dtype)


def pack(kind: str, rows: Tensor) -> Packed | None:
    """Pack blocks of a GGUF type, uint8 [N, bytes of a row]; None if the type or width has no
    kernel."""
    sizes = {"Q4_0": (2, 18), "Q4_1": (4, 20), "Q8_0": (2, 34)}
    if kind not in sizes or (rows.shape[1] // sizes[kind][1]) * GROUP % COLUMNS:
        return None
    head, size = sizes[kind]
    blocks = rows.reshape(len(rows), -1, size)
    halves = blocks[..., :head].contiguous().view(torch.float16)
    body = blocks[..., head:]
    if kind == "Q8_0":
        codes = body.contiguous().view(torch.int8).flatten(1)
    else:  # the low halves are the first 16 columns, the high halves the others
        every = torch.cat([body & 15, body >> 4], dim=-1)
        codes = (every[..., 0::2] | every[..., 1::2] << 4).flatten(1)
    offsets = halves[..., 1].contiguous() if kind == "Q4_1" else None
    return Packed(codes.contiguous(), halves[..., 0].contiguous(), offsets)
