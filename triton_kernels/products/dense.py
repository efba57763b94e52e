"""x @ weight.T with one tile size for every number of rows: a row's bits do not depend on others.

An element of the result is a sum over the columns of x. Its order follows from the shape of the
weight alone. A block of columns is multiplied by the same instruction on the same tile, full or
not, whether the step has one row or thousands. A row of the result reads only its own row of x and
the weight; its place in the tile changes which threads compute it, not what they compute. This
assumes that the hardware's instruction treats all rows of a tile in the same way. `keeps_bits`
tests it on the device.

The cost: a few rows still use tiles of 64 rows, and a narrow product does not fill the device. The
second can be avoided: the sums of a narrow weight have parts (split-K), always the same, which are
added in order. With few rows other programs compute the parts, and the last one to end adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
    parts: int = 1  # of each sum, with descriptors
    apart: bool = False  # each part is computed by another program


MANY_ROWS = 256
STAGES, AMD_STAGES = 4, 2
BAND = 16  # blocks of rows that are computed before the next weights
HAS_PARTS = False  # whether sums have parts by default; not measured on a device yet
_MAX_PARTS, _MIN_PART_COLUMNS, _MAX_PROGRAMS = 8, 1024, 640  # an H100 has 132 multiprocessors
_MAX_TILES = 1 << 14  # of few rows


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
    row, first = (tl.program_id(0) % blocks) * ROWS, (tl.program_id(0) // blocks) * OUTS
    rows, outs = row + tl.arange(0, ROWS), first + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    x_at = x_ptr + rows[:, None].to(tl.int64) * stride_x + columns[None, :]
    weight_at = weight_ptr + outs[None, :].to(tl.int64) * num_columns + columns[:, None]
    row_valid, out_valid = (rows < num_rows)[:, None], (outs < num_outs)[None, :]
    acc = dense_sum(x_at, weight_at, row_valid, out_valid, num_columns, ROWS, OUTS, COLUMNS, EVEN)
    _store_tile(acc, bias_ptr, out_ptr, row, first, num_rows, num_outs, stride_out, ROWS, OUTS)


@jit(do_not_specialize=["num_rows"])
def described_kernel(
    x, weight, bias_ptr, out_ptr, partial_ptr, ended_ptr, num_rows, num_outs, num_columns,
    stride_out, ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr,
    PARTS: tl.constexpr, APART: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute tile after tile, in bands of BAND blocks of rows, whose weights then stay in the
    cache. `x` and `weight` are descriptors, which read zeros beyond the edges. APART: sums of parts
    go to `partial_ptr`, and `ended_ptr` counts the parts of a tile; it is 0 before and after."""
    row_blocks, out_blocks = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outs, OUTS)
    width = tl.cdiv(num_columns, PARTS * COLUMNS) * COLUMNS
    num_items = row_blocks * out_blocks * (PARTS if APART else 1)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), flatten=FLATTEN):
        tile = item // PARTS if APART else item
        band = tile // (BAND * out_blocks)
        height = tl.minimum(row_blocks - band * BAND, BAND)
        at = tile % (BAND * out_blocks)
        row = (band * BAND + at % height) * ROWS
        first = at // height * OUTS
        if APART:
            part = item % PARTS
            acc = _sums(x, weight, row, first, part, width, num_columns, ROWS, OUTS, COLUMNS)
            place = tl.arange(0, ROWS)[:, None] * OUTS + tl.arange(0, OUTS)[None, :]
            sums_ptr = partial_ptr + tile.to(tl.int64) * (PARTS * ROWS * OUTS) + place
            tl.store(sums_ptr + part * (ROWS * OUTS), acc)
            tl.debug_barrier()  # all threads have stored
            if tl.atomic_add(ended_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
                acc = tl.load(sums_ptr, cache_modifier=".cg")
                for other in tl.static_range(1, PARTS):
                    acc += tl.load(sums_ptr + other * (ROWS * OUTS), cache_modifier=".cg")
                tl.store(ended_ptr + tile, 0)
                _store_tile(
                    acc, bias_ptr, out_ptr, row, first, num_rows, num_outs, stride_out, ROWS, OUTS
                )
        else:
            acc = _sums(x, weight, row, first, 0, width, num_columns, ROWS, OUTS, COLUMNS)
            for part in tl.static_range(1, PARTS):
                acc += _sums(x, weight, row, first, part, width, num_columns, ROWS, OUTS, COLUMNS)
            _store_tile(
                acc, bias_ptr, out_ptr, row, first, num_rows, num_outs, stride_out, ROWS, OUTS
            )


@jit
def _sums(
    x, weight, row, first, part, width, num_columns, ROWS: tl.constexpr, OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile over `width` columns, those of a part."""
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(part * width, tl.minimum(part * width + width, num_columns), COLUMNS):
        acc = tl.dot(x.load([row, start]), weight.load([first, start]).T, acc)
    return acc


@jit
def _store_tile(
    acc, bias_ptr, out_ptr, row, first, num_rows, num_outs, stride_out, ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):  # fmt: skip
    rows, outs = row + tl.arange(0, ROWS), first + tl.arange(0, OUTS)
    valid = (rows < num_rows)[:, None] & (outs < num_outs)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_at = out_ptr + rows[:, None].to(tl.int64) * stride_out + outs[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid)


def tile_of(
    dtype: torch.dtype,
    num_outs: int,
    num_columns: int,
    *,
    described: bool,
    num_rows: int,
    has_parts: bool = HAS_PARTS,
) -> ProductTile:
    """Return the tile for a weight. With descriptors it also depends on the number of rows. Narrow
    weights have narrow tiles and, with `has_parts`, sums of several parts, so that more programs
    share the work."""
    if dtype == torch.float32:
        return ProductTile(32, 32, 32, 4, 2)
    outs = next(outs for least, outs in ((32768, 128), (8192, 64), (0, 32)) if num_outs >= least)
    if not described:
        stages = AMD_STAGES if torch.version.hip else STAGES
        return ProductTile(64, outs, 64, 8 if outs == 128 else 4, stages)
    parts, blocks = 1, triton.cdiv(num_outs, outs)
    while has_parts and 2 * parts <= min(
        _MAX_PARTS, num_columns // _MIN_PART_COLUMNS, _MAX_PROGRAMS // blocks
    ):
        parts *= 2
    if num_rows >= MANY_ROWS:  # two sums of a part take the registers of a wider tile
        return ProductTile(128, 256 if parts == 1 else 128, 64, 8, 3, 1, parts=parts)
    more = {128: (4, 2), 64: (4, 3), 32: (8, 2)}[outs]
    return ProductTile(64, outs, 64, 4, *more, flatten=parts == 1, parts=parts, apart=parts > 1)


def dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: ProductTile | None = None,
    *,
    has_parts: bool = HAS_PARTS,
) -> None:
    """Compute `out` [T, N] = x [T, K] @ weight [N, K].T + bias [N], summed in fp32 and rounded
    once. All have one type; `out` may also be fp32. Rows of `x` and of `out` may be strided.
    `tile`: by default `tile_of` with `has_parts`, which affects bits. Raises ValueError naming the
    argument that does not fit."""
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
        kind = weight.dtype, num_outs, num_columns
        # The tile for many rows has no room in shared memory for an fp32 result.
        rows = num_rows if out.dtype == x.dtype else min(num_rows, MANY_ROWS - 1)
        tile = tile_of(*kind, described=described, num_rows=rows, has_parts=has_parts)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outs, tile.outs)
    if tile.programs:
        processors = 1
        if x.is_cuda:
            processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        blocks = [tile.rows, tile.columns], [tile.outs, tile.columns]
        pair = (
            TensorDescriptor.from_tensor(*each) for each in zip((x, weight), blocks, strict=True)
        )
        partial, ended = out, out
        if tile.apart:
            sums = (tiles, tile.parts, tile.rows, tile.outs)
            partial = torch.empty(sums, dtype=torch.float32, device=x.device)
            tiles, ended = tiles * tile.parts, _zeros(x.device)
        described_kernel[(min(tiles, tile.programs * processors),)](
            *pair, bias, out, partial, ended, num_rows, num_outs, num_columns, out.stride(0),
            ROWS=tile.rows, OUTS=tile.outs, COLUMNS=tile.columns, BAND=BAND, PARTS=tile.parts,
            APART=tile.apart, FLATTEN=tile.flatten, num_warps=tile.num_warps,
            num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        return
    dense_kernel[(tiles,)](
        x, weight, bias, out, num_rows, num_outs, num_columns, x.stride(0), out.stride(0),
        ROWS=tile.rows, OUTS=tile.outs, COLUMNS=tile.columns,
        EVEN=num_columns % tile.columns == 0, num_warps=tile.num_warps,
        num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


@cache
def _zeros(device: torch.device) -> Tensor:
    """Return counters of a device, which every product leaves at 0."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


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
