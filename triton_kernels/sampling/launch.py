"""Launchers of the sampling kernels, with checks of their inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from triton_kernels.build.check import check_fields, check_tensor
from triton_kernels.build.hopper import is_hopper
from triton_kernels.sampling import lists, scan
from triton_kernels.sampling.collect import collect_kernel, first_end_kernel
from triton_kernels.sampling.distributions import distributions_kernel
from triton_kernels.sampling.inputs import Distributions, LogitsBatch, Overlay
from triton_kernels.sampling.scan import scan_kernel
from triton_kernels.sampling.shape import shape_kernel

LOGITS = (torch.bfloat16, torch.float16, torch.float32)
# Least tiles per row in kernel code; with fewer, `distributions_kernel` would spill registers.
_MIN_TILES = 64
# Kernels are compiled for the tiles of the vocabulary, plus 1/8 of their number for listed tokens.
_LISTED_TILES_DIVISOR = 8


class CompileOptions(NamedTuple):
    """Compile options of a kernel. A limit of registers, from sm_90 on, lets more programs share a
    multiprocessor; on sm_80 the code would spill."""

    num_warps: int
    registers: int | None = None


class Tiling(NamedTuple):
    """Sizes of the parts of a row, powers of two. They affect drawn tokens only by rounding."""

    pieces: int = 32  # per tile
    piece: int = 128  # tokens
    chunk: int = 16  # pieces that `distributions` reads at once
    list_tokens: int = 4096  # one more than `distributions` can list; at most 4096
    scan: CompileOptions = CompileOptions(8, 64)
    shape: CompileOptions = CompileOptions(16)
    distributions: CompileOptions = CompileOptions(16)
    residual: CompileOptions = CompileOptions(16, 64)
    # If given, each tile of a filtered row first lists its likeliest tokens, see `collect`.
    collect: CompileOptions | None = None

    @property
    def tile(self) -> int:
        return self.pieces * self.piece

    def num_tiles(self, tokens: int) -> int:
        return triton.cdiv(tokens, self.tile)


TILING = Tiling()
COLLECTING = TILING._replace(collect=CompileOptions(8))  # not measured on a device yet


class Scanned(NamedTuple):
    """Results of the scan of N rows of T tiles."""

    tiles: Tensor  # fp32 [N, T, 4]: fields, see `scan`
    winners: Tensor  # int64 [N, T]: race keys, see `order.race_key`
    piece_tops: Tensor  # fp32 [N, T, pieces]: maxima; like the next field only of filtered rows
    piece_masses: Tensor  # fp32 [N, T, pieces]: relative to the maximum of the tile


class Scratch(NamedTuple):
    """Memory of `distributions` for N rows."""

    pieces: Tensor  # int32 [N, T, pieces]
    codes: Tensor  # int64 [N, list_tokens]
    collected: Tensor  # int64 [N, 4]: fields, see `collect`; `codes` if nothing is collected


def draw(
    batch: LogitsBatch,
    purpose: int,
    tiling: Tiling = TILING,
    *,
    dists: Distributions | None = None,
    first: int = 0,
    step: int = 1,
    listed: Tensor | None = None,
) -> Distributions:
    """Draw a token of each row, and return the distributions of the rows.

    Greedy requests get the likeliest token. Others get a draw, with COUPLED noise for coupled
    requests and noise of `purpose` for the rest. Ties go to the lowest id. Masses and cuts are
    exact if the purpose is DRAFT and the request is verified by rejection.

    If `dists` is given, the distribution of row i is stored there at `first + i * step`. If
    `listed` fp32 [N, L] is given, it gets the shaped logits of listed tokens. If logits are shaped,
    forbidden tokens are marked in `batch.logits`. Raises ValueError naming the argument that does
    not fit."""
    kernel_args = scan_rows(batch, purpose, None, tiling, listed)
    if dists is None:
        dists = Distributions.allocate(len(batch.logits), batch.logits.device)
    find_distributions(kernel_args, dists, first, step)
    return dists


def sample(batch: LogitsBatch, purpose: int, tiling: Tiling = TILING) -> Tensor:
    """Return the tokens of `draw`, int32 [N]."""
    return draw(batch, purpose, tiling).tokens[:, 0]


def scan_rows(
    batch: LogitsBatch,
    purpose: int,
    certain: Tensor | None,
    tiling: Tiling = TILING,
    listed: Tensor | None = None,
) -> dict[str, Any]:
    """Scan all logits. Return the arguments of the kernels that follow, by name."""
    check(batch)
    kernel_args = kernel_arguments(batch, purpose, certain, tiling, listed)
    num_rows, dense = len(batch.logits), kernel_args["num_dense"]
    if num_rows:
        if batch.shaping is not None:
            grid = num_rows, kernel_args["num_tiles"] - dense
            launch(shape_kernel, grid, kernel_args, tiling.shape)
        aligned = kernel_args["vocab"] % 16 == 0  # else loads of single logits need more registers
        options = tiling.scan if aligned else CompileOptions(tiling.scan.num_warps)
        launch(scan_kernel, (num_rows, dense), kernel_args, options)
    return kernel_args


def find_distributions(
    kernel_args: dict[str, Any], dists: Distributions, first: int = 0, step: int = 1
) -> None:
    """Find the distribution of each row from the results of `scan_rows`. Row i is stored at place
    `first + i * step`."""
    scanned, tiling = kernel_args["scanned"], kernel_args["tiling"]
    num_rows, num_pieces = len(scanned.tiles), kernel_args["num_tiles"] * tiling.pieces
    if num_rows:
        device, collect = scanned.tiles.device, tiling.collect
        pieces = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=device)
        codes = torch.empty((num_rows, tiling.list_tokens), dtype=torch.int64, device=device)
        collected = codes
        if collect is not None:
            fields = num_rows, lists.COLLECTED_FIELDS.value
            collected = torch.empty(fields, dtype=torch.int64, device=device)
        kernel_args = kernel_args | {
            "scratch": Scratch(pieces, codes, collected),
            "dists": dists,
            "first_out": first,
            "out_step": step,
            "COLLECTS": collect is not None,
        }
        if collect is not None:
            launch(first_end_kernel, (num_rows,), kernel_args, collect)
            launch(collect_kernel, (num_rows, kernel_args["num_tiles"]), kernel_args, collect)
        launch(distributions_kernel, (num_rows,), kernel_args, tiling.distributions)


def kernel_arguments(
    batch: LogitsBatch, purpose: int, certain: Tensor | None, tiling: Tiling, listed: Tensor | None
) -> dict[str, Any]:
    """Return arguments of all kernels. An absent tensor is replaced by another one of its type, so
    that kernels need not be compiled for its absence."""
    (num_rows, vocab), shaping = batch.logits.shape, batch.shaping
    width = 0 if shaping is None else shaping.listed.shape[1]
    dense = tiling.num_tiles(vocab)
    num_tiles = dense + tiling.num_tiles(width)
    max_tiles = dense + triton.cdiv(dense, _LISTED_TILES_DIVISOR)
    tiles, device = (num_rows, num_tiles), batch.logits.device
    scanned = Scanned(
        torch.empty((*tiles, scan.TILE_FIELDS.value), dtype=torch.float32, device=device),
        torch.empty(tiles, dtype=torch.int64, device=device),
        *(
            torch.empty((*tiles, tiling.pieces), dtype=torch.float32, device=device)
            for _ in range(2)
        ),
    )
    overlay = Overlay(batch.rows.requests, scanned.tiles)
    if shaping is not None:
        overlay = Overlay.allocate(num_rows, width, device)
        overlay = overlay if listed is None else overlay._replace(logits=listed)
    power = triton.next_power_of_2(max(num_tiles, max_tiles, _MIN_TILES))
    return {
        "batch": batch._replace(shaping=None),
        "shaping": shaping,
        "certain_ptr": batch.requests.modes if certain is None else certain,
        "plain_ptr": batch.rows.requests if shaping is None else shaping.plain,
        "overlay": overlay,
        "scanned": scanned,
        "tiling": tiling,
        "vocab": vocab,
        "stride": batch.logits.stride(0),
        "list_width": width,
        "logits_step": 0 if shaping is None else overlay.logits.stride(0),
        "num_tiles": num_tiles,
        "num_dense": dense,
        "purpose": purpose,
        "any_drawn": int(certain is not None),
        "shaped": int(shaping is not None),
        "PIECES": tiling.pieces,
        "PIECE": tiling.piece,
        "CHUNK": tiling.chunk,
        "LIST": tiling.list_tokens,
        "TILES": power,
        "ALL_PIECES": power * tiling.pieces,
    }


def launch(
    kernel: Any, grid: tuple[int, ...], kernel_args: dict[str, Any], build: CompileOptions
) -> None:
    """Launch a kernel with those of `kernel_args` that it takes."""
    used_args = {name: value for name, value in kernel_args.items() if name in kernel.arg_names}
    if build.registers is not None and is_hopper():
        used_args["maxnreg"] = build.registers
    # Fused operations would not give the specified noise.
    kernel[grid](**used_args, num_warps=build.num_warps, num_stages=1, enable_fp_fusion=False)


def bytes_a_row(vocab: int, listed: int, tiling: Tiling = TILING) -> int:
    """Return the most bytes that drawing or verification allocates for each row of logits."""
    tiles = tiling.num_tiles(vocab) + tiling.num_tiles(listed)
    return tiles * (12 * tiling.pieces + 40) + 8 * (listed + tiling.list_tokens) + 96


def check(batch: LogitsBatch) -> None:
    """Raise ValueError naming the argument that does not fit."""
    logits, rows, requests, noise, drafts, shaping = batch
    if logits.dim() != 2 or logits.dtype not in LOGITS or logits.stride(1) != 1:
        raise ValueError(
            f"logits: {logits.dtype} {list(logits.shape)} does not fit; give bf16, fp16 or fp32 "
            "[N, V], the logits of a row side by side"
        )
    (num_rows, vocab), count = logits.shape, len(requests.modes)
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    check_fields("rows", rows, {n: (i32, (num_rows,)) for n in rows._fields})
    request_fields = {n: (f32, (count,)) for n in ("temperatures", "top_p", "min_p")}
    request_fields |= {n: (i32, (count,)) for n in ("modes", "top_k")}
    check_fields("requests", requests, request_fields)
    check_fields("noise", noise, {n: (i64, (count,)) for n in ("choices", "positions")})
    check_tensor("noise.keys", noise.keys, i64, (count, 2))
    draft_fields = {"tokens": (i32, (None,)), "starts": (i32, (count,)), "counts": (i32, (count,))}
    check_fields("drafts", drafts, draft_fields)
    if shaping is None:
        return
    width = shaping.listed.shape[-1]
    shaping_fields = {n: (i32, (count, width)) for n in ("listed", "counts", "marks")}
    shaping_fields |= {n: (i32, (count,)) for n in ("num_listed", "min_tokens")}
    shaping_fields["plain"] = (i32, (count, triton.cdiv(vocab, 32)))
    shaping_fields["bias"], shaping_fields["penalties"] = (f32, (count, width)), (f32, (count, 3))
    check_fields("shaping", shaping, shaping_fields)
