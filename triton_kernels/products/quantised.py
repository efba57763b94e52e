"""x @ weight.T with weights of 4 or 8 bits, dequantised inside the kernel.

A weight is code * scale + offset, with an fp16 scale and offset for each 32 columns: the form of
GGUF's Q4_0, Q4_1 and Q8_0, and so of compressed-tensors, GPTQ and AWQ. With MXFP4, codes are
numbers of 4 bits (E2M1) and scales powers of two (E8M0), without offsets. The dequantised weight
is rounded to x.dtype and multiplied as in `dense`: the tile size and the order of the sum do not
depend on the number of rows.
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
    scales: Tensor  # fp16 [N, K / 32], or for MXFP4 uint8: the exponent plus 127
    offsets: Tensor | None  # None: offset = -8 * scale (4 bits) or 0 (8 bits)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), self.scales.shape[1] * GROUP

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


@jit
def _load_codes(
    codes_ptr, at, valid, FOUR_BIT: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load a tile, integers [OUTS, COLUMNS]."""
    if FOUR_BIT:
        columns = tl.arange(0, COLUMNS // 2)[None, :]
        pairs = tl.load(codes_ptr + at // 2 + columns, mask=valid, other=0)
        return tl.reshape(tl.join(pairs & 15, pairs >> 4), [OUTS, COLUMNS])
    else:
        columns = tl.arange(0, COLUMNS)[None, :]
        return tl.load(codes_ptr + at + columns, mask=valid, other=0)


@jit
def _mxfp4(codes, scales):
    """Return the fp32 values of E2M1 codes, which are fp16 numbers without their lowest bits times
    2^-14, and of E8M0 scales, which are the exponents of fp32 numbers."""
    codes = codes.to(tl.int16)
    halves = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.float16, bitcast=True)
    bits = tl.maximum(scales.to(tl.int32) << 23, 1 << 22)
    return halves.to(tl.float32) * 16384.0, bits.to(tl.float32, bitcast=True)


@jit
def quantised_sum(
    x_at, row_valid, codes_ptr, scales_ptr, offsets_ptr, outs, out_valid, num_columns,
    FOUR_BIT: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile, fp32 [ROWS, OUTS]. `x_at` [ROWS, COLUMNS] points to the first
    columns; `outs` int64 [OUTS, 1] are rows of the weight."""
    groups = tl.arange(0, COLUMNS // _GROUP)[None, :]
    weight_offsets = outs * num_columns
    group_offsets = outs * (num_columns // _GROUP) + groups
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        x = tl.load(x_at, mask=row_valid, other=0.0)
        scales = tl.load(scales_ptr + group_offsets, mask=out_valid, other=0)
        codes = _load_codes(codes_ptr, weight_offsets + start, out_valid, FOUR_BIT, OUTS, COLUMNS)
        codes = tl.reshape(codes, [OUTS, COLUMNS // _GROUP, _GROUP])
        if scales_ptr.dtype.element_ty == tl.uint8:
            codes, scales = _mxfp4(codes, scales)
        else:
            codes, scales = codes.to(tl.float32), scales.to(tl.float32)
            if FOUR_BIT and offsets_ptr is None:
                codes -= 8.0
        weight = codes * scales[:, :, None]
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + group_offsets, mask=out_valid, other=0.0).to(tl.float32)
            weight += offsets[:, :, None]
        weight = tl.reshape(weight, [OUTS, COLUMNS]).to(x.dtype)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        x_at += COLUMNS
        group_offsets += COLUMNS // _GROUP
    return acc


@jit(do_not_specialize=["num_rows"])
def quantised_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr, num_rows, num_outs, num_columns,
    stride_x, stride_out, FOUR_BIT: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one output tile. Programs that read the same weight tile are adjacent, so it stays in
    L2."""
    blocks = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    outs = (tl.program_id(0) // blocks) * OUTS + tl.arange(0, OUTS)
    row_valid, out_valid = (rows < num_rows)[:, None], (outs < num_outs)[:, None]
    x_at = x_ptr + rows[:, None].to(tl.int64) * stride_x + tl.arange(0, COLUMNS)[None, :]
    acc = quantised_sum(
        x_at, row_valid, codes_ptr, scales_ptr, offsets_ptr, outs[:, None].to(tl.int64), out_valid,
        num_columns, FOUR_BIT, ROWS, OUTS, COLUMNS,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[None, :]
    valid = row_valid & (outs < num_outs)[None, :]
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * stride_out + outs[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=valid)


def quantised(x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> None:
    """Compute `out` [T, N] = x [T, K] @ weight [N, K].T + bias [N], summed in fp32 and rounded
    once. `x` and `out` have one type, and their rows may be strided. Raises ValueError naming the
    argument that does not fit."""
    num_outs, num_columns = weight.shape
    four_bit = weight.codes.dtype == torch.uint8
    if weight.codes.numel() * (2 if four_bit else 1) != num_outs * num_columns:
        raise ValueError(f"weight.codes: {list(weight.codes.shape)} for {[num_outs, num_columns]}")
    if x.shape[1] != num_columns or x.stride(1) != 1:
        raise ValueError(
            f"x: {list(x.shape)}; give [T, {num_columns}], contiguous in the last dimension"
        )
    if num_columns % COLUMNS:
        raise ValueError(f"weight: {num_columns} columns; give a multiple of {COLUMNS}")
    if tuple(out.shape) != (len(x), num_outs) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out: {out.dtype} {list(out.shape)}; give {x.dtype} {[len(x), num_outs]}")
    if not len(x):
        return
    programs = triton.cdiv(len(x), ROWS) * triton.cdiv(num_outs, OUTS)
    quantised_kernel[(programs,)](
        x, weight.codes, weight.scales, weight.offsets, bias, out, len(x), num_outs, num_columns,
        x.stride(0), out.stride(0), FOUR_BIT=four_bit, ROWS=ROWS, OUTS=OUTS, COLUMNS=COLUMNS,
        num_warps=NUM_WARPS, num_stages=num_stages(), enable_fp_fusion=False,
    )  # fmt: skip


def num_stages() -> int:
    return 2 if torch.version.hip else 3


def dequantise(weight: Packed) -> Tensor:
    """Return the dequantised matrix, fp32 [N, K]."""
    codes = weight.codes
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    if weight.scales.dtype == torch.uint8:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        values = torch.cat([values, -values])[codes.int()]
        return torch.ldexp(values, weight.scales.int().repeat_interleave(GROUP, 1) - 127)
    scales = weight.scales.float().repeat_interleave(GROUP, 1)
    if weight.offsets is not None:
        return codes.float() * scales + weight.offsets.float().repeat_interleave(GROUP, 1)
    return (codes.float() - (8 if weight.codes.dtype == torch.uint8 else 0)) * scales


def quantised_reference(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Compute `quantised` in plain torch, summed in a different order."""
    product = x.double() @ dequantise(weight).to(x.dtype).double().t()
    return (product if bias is None else product + bias.double()).to(x.dtype)


def pack(kind: str, rows: Tensor) -> Packed | None:
    """Pack blocks of a GGUF type, uint8 [N, bytes of a row]; None if the type or width has no
    kernel."""
    sizes = {"Q4_0": (2, 18), "Q4_1": (4, 20), "Q8_0": (2, 34), "MXFP4": (1, 17)}
    if kind not in sizes or (rows.shape[1] // sizes[kind][1]) * GROUP % COLUMNS:
        return None
    header_bytes, block_bytes = sizes[kind]
    blocks = rows.reshape(len(rows), -1, block_bytes)
    header = blocks[..., :header_bytes].contiguous()
    header = header if kind == "MXFP4" else header.view(torch.float16)  # scale, offset
    payload = blocks[..., header_bytes:]
    if kind == "Q8_0":
        codes = payload.contiguous().view(torch.int8).flatten(1)
    else:  # the low halves are the first 16 columns, the high halves the others
        columns = torch.cat([payload & 15, payload >> 4], dim=-1)
        codes = (columns[..., 0::2] | columns[..., 1::2] << 4).flatten(1)
    offsets = header[..., 1].contiguous() if kind == "Q4_1" else None
    return Packed(codes.contiguous(), header[..., 0].contiguous(), offsets)
