"""x @ weight.T with one tile size for every number of rows: a row's bits do not depend on others.

An element of the result is a sum over the columns of x. Its order follows from the shape of the
weight alone: no part of the sum goes to another program (split-K). A block of columns is multiplied
by the same instruction on the same tile, full or not, whether the step has one row or thousands. A
row of the result reads only its own row of x and the weight; its place in the tile changes which
threads compute it, not what they compute. This assumes that the hardware's instruction treats all
rows of a tile in the same way. `keeps_bits` tests it on the device.

The cost: a few rows still use tiles of 64 rows, and a narrow product does not fill the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.build.hopper import has_large_tiles
from triton_kernels.build.jit import jit


class ProductTile(NamedTuple):
    rows: int
    outs: int
    columns: int  # columns of x per step of the sum
    num_warps: int
    num_stages: int
    programs: int = 0  # per multiprocessor, with TMA descriptors; 0: loads by pointers
    flatten: bool = True  # programs load for the next tile while they finish one


MANY_ROWS = 256
STAGES, AMD_STAGES = 4, 2
BAND = 16  # blocks of rows that are computed before the next weights


@jit
def dense_sum(
    x_at, weight_at, row_valid, out_valid, num_columns, ROWS: tl.constexpr, OUTS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile, fp32 [ROWS, OUTS]. `x_at` [ROWS, COLUMNS] and `weight_at`
    [COLUMNS, OUTS] point to the first columns."""
    columns = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        if EVEN:
            x = tl.load(x_at, mask=row_valid, other=0.0)
            weight = tl.load(weight_at, mask=out_valid, other=0.0)
        else:
            inside = columns < num_columns - start
            x = tl.load(x_at, mask=row_valid & inside[None, :], other=0.0)
            weight = tl.load(weight_at, mask=out_valid & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_at += COLUMNS
        weight_at += COLUMNS
    return acc


@jit(do_not_specialize=["num_rows"])
def dense_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outs, num_columns, stride_x, stride_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the result. Tiles of one block of the weight are consecutive."""
    blocks = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    outs = (tl.program_id(0) // blocks) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    x_at = x_ptr + rows[:, None].to(tl.int64) * stride_x + columns[None, :]
    weight_at = weight_ptr + outs[None, :].to(tl.int64) * num_columns + columns[:, None]
    row_valid, out_valid = (rows < num_rows)[:, None], (outs < num_outs)[None, :]
    acc = dense_sum(x_at, weight_at, row_valid, out_valid, num_columns, ROWS, OUTS, COLUMNS, EVEN)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + rows[:, None].to(tl.int64) * stride_out + outs[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_valid & out_valid)


@jit(do_not_specialize=["num_rows"])
def described_kernel(
    x, weight, bias_ptr, out_ptr, num_rows, num_outs, num_columns, stride_out, ROWS: tl.constexpr,
    OUTS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute tile after tile, in bands of BAND blocks of rows, whose weights then stay in the
    cache. `x` and `weight` are descriptors, which read zeros beyond the edges."""
    row_blocks, out_blocks = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outs, OUTS)
    for tile in tl.range(
        tl.program_id(0), row_blocks * out_blocks, tl.num_programs(0), flatten=FLATTEN
    ):
        band = tile // (BAND * out_blocks)
        height = tl.minimum(row_blocks - band * BAND, BAND)
        at = tile % (BAND * out_blocks)
        row = (band * BAND + at % height) * ROWS
        first = at // height * OUTS
        acc = tl.zeros([ROWS, OUTS], tl.float32)
        for start in range(0, num_columns, COLUMNS):
            acc = tl.dot(x.load([row, start]), weight.load([first, start]).T, acc)
        rows, outs = row + tl.arange(0, ROWS), first + tl.arange(0, OUTS)
        valid = (rows < num_rows)[:, None] & (outs < num_outs)[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        out_at = out_ptr + rows[:, None].to(tl.int64) * stride_out + outs[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid)


def tile_of(dtype: torch.dtype, num_outs: int, *, described: bool, num_rows: int) -> ProductTile:
    """Return the tile for a weight. With descriptors it also depends on the number of rows. Narrow
    weights have narrow tiles, so that more programs share the work."""
    if dtype == torch.float32:
        return ProductTile(32, 32, 32, 4, 2)
    if described and num_rows >= MANY_ROWS:
        return ProductTile(128, 256, 64, 8, 3, 1)
    outs = next(outs for least, outs in ((32768, 128), (8192, 64), (0, 32)) if num_outs >= least)
    if described:
        return ProductTile(64, outs, 64, 4, *{128: (4, 2), 64: (4, 3), 32: (8, 2)}[outs])
    stages = AMD_STAGES if torch.version.hip else STAGES
    return ProductTile(64, outs, 64, 8 if outs == 128 else 4, stages)


def dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: ProductTile | None = None
) -> None:
    """Compute `out` [T, N] = x [T, K] @ weight [N, K].T + bias [N], summed in fp32 and rounded
    once. All have one type; `out` may also be fp32. Rows of `x` and of `out` may be strided.
    `tile`: by default `tile_of`. Raises ValueError naming the argument that does not fit."""
    num_rows, num_columns = x.shape
    num_outs = weight.shape[0]
    if not weight.is_contiguous() or tuple(weight.shape) != (num_outs, num_columns):
        raise ValueError(f"weight: {list(weight.shape)}; give [N, {num_columns}], contiguous")
    if tuple(out.shape) != (num_rows, num_outs):
        raise ValueError(f"out: {list(out.shape)} does not fit; give {[num_rows, num_outs]}")
    for name, tensor in (("x", x), ("out", out), ("weight", weight)):
        wide = tensor is out and out.dtype == torch.float32
        if (tensor.dtype != weight.dtype and not wide) or tensor.stride(1) != 1:
            raise ValueError(f"{name}: {tensor.dtype}; give {weight.dtype}, elements side by side")
    if not num_rows:
        return
    if tile is None:
        aligned = not any(n * x.itemsize % 16 for n in (num_columns, x.stride(0)))
        described = aligned and x.data_ptr() % 16 == 0 and has_large_tiles()
        # The tile for many rows has no room in shared memory for an fp32 result.
        rows = num_rows if out.dtype == x.dtype else min(num_rows, MANY_ROWS - 1)
        tile = tile_of(weight.dtype, num_outs, described=described, num_rows=rows)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outs, tile.outs)
    if tile.programs:
        processors = 1
        if x.is_cuda:
            processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        blocks = [tile.rows, tile.columns], [tile.outs, tile.columns]
        pair = (
            TensorDescriptor.from_tensor(*each) for each in zip((x, weight), blocks, strict=True)
        )
        described_kernel[(min(tiles, tile.programs * processors),)](
            *pair, bias, out, num_rows, num_outs, num_columns, out.stride(0), ROWS=tile.rows,
            OUTS=tile.outs, COLUMNS=tile.columns, BAND=BAND, FLATTEN=tile.flatten,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        return
    dense_kernel[(tiles,)](
        x, weight, bias, out, num_rows, num_outs, num_columns, x.stride(0), out.stride(0),
        ROWS=tile.rows, OUTS=tile.outs, COLUMNS=tile.columns,
        EVEN=num_columns % tile.columns == 0, num_warps=tile.num_warps,
        num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def dense_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `dense` in plain torch, with another order of sums."""
    product = x.double() @ weight.double().t()
    return (product if bias is None else product + bias.double()).to(x.dtype)


def keeps_bits(product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether rows of a product keep their bits on this device: alone, with others,
    elsewhere in a tile, in another tile, and with the tile for many rows. `x` needs more than
    MANY_ROWS rows."""
    whole = product(x)
    parts = [slice(0, 1), slice(0, 17), slice(0, 64), slice(5, 6), slice(61, 70), slice(3, None)]
    return all(torch.equal(product(x[part]), whole[part]) for part in parts)
