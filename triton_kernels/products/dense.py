"""x @ weight.T by one tile for every number of rows: a row's bits are its own.

What a row becomes is a sum over the columns of x. Here its order follows from the shape of the
weight alone: no part of it goes to another program (split-K), and a block of columns is multiplied
by the same instruction on the same tile, full or not, whether the step has one row or thousands. In
a tile a row of the result reads its own row of x and the weight, nothing else; where in the tile it
lies changes which threads do that, not what they do. That the hardware's instruction treats all
rows of a tile alike is taken for granted here, and looked at where it runs (`keeps_bits`).

The price: few rows work in tiles of 64, and a product too narrow to fill the device stays so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.case import TARGETS, CaseLimits, KernelCase, case_of
from triton_kernels.build.jit import jit


class ProductTile(NamedTuple):
    rows: int
    outs: int
    columns: int  # of x, a step of the sum
    num_warps: int
    num_stages: int


_STAGES, _STAGES_OF_AMD = 4, 2


@jit(do_not_specialize=["num_rows"])
def dense_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outs, num_columns, stride_x, stride_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A program a tile of the result; those of one block of the weight follow one another."""
    blocks = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    outs = (tl.program_id(0) // blocks) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    x_at = x_ptr + rows[:, None].to(tl.int64) * stride_x + columns[None, :]
    weight_at = weight_ptr + outs[None, :].to(tl.int64) * num_columns + columns[:, None]
    row_held, out_held = (rows < num_rows)[:, None], (outs < num_outs)[None, :]
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        if EVEN:
            x = tl.load(x_at, mask=row_held, other=0.0)
            weight = tl.load(weight_at, mask=out_held, other=0.0)
        else:
            inside = columns < num_columns - start
            x = tl.load(x_at, mask=row_held & inside[None, :], other=0.0)
            weight = tl.load(weight_at, mask=out_held & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_at += COLUMNS
        weight_at += COLUMNS
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + rows[:, None].to(tl.int64) * stride_out + outs[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_held & out_held)


def tile_of(dtype: torch.dtype, num_outs: int) -> ProductTile:
    """By the weight alone. Narrow ones have narrow tiles: as many programs as may be read it."""
    stages = _STAGES_OF_AMD if torch.version.hip else _STAGES
    if dtype == torch.float32:
        return ProductTile(32, 32, 32, 4, 2)
    outs = next(outs for least, outs in ((32768, 128), (8192, 64), (0, 32)) if num_outs >= least)
    return ProductTile(64, outs, 64, 8 if outs == 128 else 4, stages)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out` [T, N] = x [T, K] @ weight [N, K].T + bias [N], summed in fp32 and rounded once; all of
    one type. Rows of `x` and of `out` may lie apart. Raises ValueError naming the argument that
    does not fit."""
    num_rows, num_columns = x.shape
    num_outs = weight.shape[0]
    if not weight.is_contiguous() or tuple(weight.shape) != (num_outs, num_columns):
        raise ValueError(f"weight: {list(weight.shape)}; give [N, {num_columns}], contiguous")
    if tuple(out.shape) != (num_rows, num_outs):
        raise ValueError(f"out: {list(out.shape)} does not fit; give {[num_rows, num_outs]}")
    for name, tensor in (("x", x), ("out", out), ("weight", weight)):
        if tensor.dtype != weight.dtype or tensor.stride(1) != 1:
            raise ValueError(f"{name}: {tensor.dtype}; give {weight.dtype}, elements side by side")
    if not num_rows:
        return
    tile = tile_of(weight.dtype, num_outs)
    programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outs, tile.outs)
    dense_kernel[(programs,)](
        x, weight, bias, out, num_rows, num_outs, num_columns, x.stride(0), out.stride(0),
        ROWS=tile.rows, OUTS=tile.outs, COLUMNS=tile.columns,
        EVEN=num_columns % tile.columns == 0, num_warps=tile.num_warps,
        num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def dense_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`dense` in plain torch, but for the order of its sums."""
    found = x.double() @ weight.double().t()
    return (found if bias is None else found + bias.double()).to(x.dtype)


def keeps_bits(product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether rows of a product keep their bits on this device: alone, among others, elsewhere in a
    tile and in another one. `x` has more than two tiles of rows."""
    whole = product(x)
    parts = [slice(0, 1), slice(0, 17), slice(0, 64), slice(5, 6), slice(61, 70), slice(3, None)]
    return all(torch.equal(product(x[part]), whole[part]) for part in parts)


def cases() -> list[KernelCase]:
    """What the table has of 16 bits, with and without bias; fp32 has no use for tensor cores."""
    found = []
    for num_outs, biased in itertools.product((4096, 8192, 32768), (False, True)):
        tile = tile_of(torch.bfloat16, num_outs)
        made = {"ROWS": tile.rows, "OUTS": tile.outs, "COLUMNS": tile.columns, "EVEN": True}
        made |= {} if biased else {"bias_ptr": None}
        pointers = [f"{name}_ptr" for name in ("x", "weight", "bias", "out")]
        for targets, stages in ((TARGETS[:3], _STAGES), (TARGETS[3:], _STAGES_OF_AMD)):
            found.append(
                case_of(
                    "dense",
                    f"bf16 {tile.rows}x{tile.outs}{' bias' if biased else ''}",
                    dense_kernel,
                    made,
                    CaseLimits(registers=200, shared_bytes=160 << 10),
                    num_warps=tile.num_warps,
                    num_stages=stages,
                    types=dict.fromkeys(pointers, "*bf16"),
                    divisible=("num_outs", "num_columns", "stride_x", "stride_out"),
                    targets=targets,
                    wgmma=True,
                    wide_loads=not biased,  # a bias is a vector
                )
            )
    return found
