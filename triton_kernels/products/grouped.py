"""Mixtures of experts: each row of x is multiplied by the weights of the experts that it chose.

A pair is a row and one of its experts. `route` chooses the experts, `sort_pairs` sorts the pairs by
expert, `grouped` multiplies them in tiles of one expert, and `combine` sums each row's results. As
in `dense`, a row's bits do not depend on other rows: tiles have one size, and a row's experts are
summed in the order of its own choice. Nothing waits for the device. A launch has as many programs
as the pairs might need; those without a tile end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.check import check_tensor
from triton_kernels.build.jit import jit
from triton_kernels.layers.activation import activate_reference, activated
from triton_kernels.products.dense import dense_sum
from triton_kernels.products.quantised import Packed, dequantise, num_stages, quantised_sum

_SIGMOID_EPS = tl.constexpr(1e-6)  # added to a sum of sigmoids
_NAN = tl.constexpr(tl.PropagateNan.ALL)
_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024


class GroupedTile(NamedTuple):
    rows: int
    outs: int
    columns: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, weight: Tensor | Packed) -> GroupedTile:
        """Return the tile for rows of `dtype`; it does not depend on their number."""
        if isinstance(weight, Packed):
            return cls(64, 64, 64, 4, num_stages())
        if dtype == torch.float32:
            return cls(32, 32, 32, 4, 2)
        return cls(64, 64, 64, 4, 2 if torch.version.hip else 4)


class Matrices(NamedTuple):
    """The matrices of all experts, stacked by rows: [experts * outs, K], and biases [experts *
    outs]. Before an activation, the rows of gate and up alternate."""

    weight: Tensor | Packed
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes if isinstance(self.weight, Packed) else self.weight.nbytes


class ExpertGate(NamedTuple):
    """An activation of (gate, up). `clamped`, gpt-oss's, uses `limit` and `alpha`."""

    activation: str
    limit: float = 0.0
    alpha: float = 0.0


class SortedPairs(NamedTuple):
    """Pairs of rows and experts, numbered row * choices + choice. Tile i has the pairs at places
    [starts[i], ends[i]) of `order`."""

    order: Tensor  # int32 [pairs]: numbers of pairs, sorted by expert
    tiles: Tensor  # int32 [3, most tiles]: expert, start and end
    num_tiles: Tensor  # int32 [1]


# --- routing --------------------------------------------------------------------------------------


@jit
def route_kernel(
    scores_ptr, bias_ptr, chosen_ptr, weights_ptr, num_experts, stride, scale,
    CHOICES: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr, SHARED: tl.constexpr,
    PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Route one row. Numbers that are not finite choose valid experts, with weights of NaN."""
    row = tl.program_id(0).to(tl.int64)
    at, places = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    scores = tl.load(scores_ptr + row * stride + at, mask=at < num_experts, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))  # 0 beyond the last expert
    ranked = tl.where(at < num_experts, scores, float("-inf"))
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + at, mask=at < num_experts, other=0.0)
    remaining = tl.where(ranked == ranked, ranked, float("-inf"))
    top = tl.maximum(tl.max(remaining, 0), -3e38)  # finite, also for a row of NaN
    chosen, weights = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32)
    for i in range(CHOICES):
        expert = tl.min(tl.where(remaining == tl.max(remaining, 0), at, BLOCK), 0)
        score = tl.sum(tl.where(at == expert, scores, 0.0), 0)
        chosen = tl.where(places == i, expert, chosen)
        weights = tl.where(places == i, score if SIGMOID else tl.exp(score - top), weights)
        remaining = tl.where(at == expert, float("-inf"), remaining)
    if not SIGMOID:
        weights /= tl.sum(weights if NORMALIZED else tl.exp(scores - top), 0)
    elif NORMALIZED:
        weights /= tl.sum(weights, 0) + _SIGMOID_EPS
    if SIGMOID:
        weights *= scale
    if SHARED:
        gate = tl.load(scores_ptr + row * stride + num_experts)
        weights = tl.where(places == CHOICES, 1.0 / (1.0 + tl.exp(-gate)), weights)
    tl.store(chosen_ptr + row * CHOICES + places, chosen, mask=places < CHOICES)
    at_weight = weights_ptr + row * (CHOICES + SHARED) + places
    tl.store(at_weight, weights, mask=places < CHOICES + SHARED)


def route(
    scores: Tensor,
    choices: int,
    *,
    normalized: bool,
    shared: bool = False,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return each row's experts int32 [T, choices], those of the highest scores, and their weights
    fp32. Weights are a softmax over all scores, or with `normalized` over the chosen ones; the
    first of equal scores wins. With `shared`, the last column of the scores is the gate of a shared
    expert, and the last weight its sigmoid. With `sigmoid`, weights are sigmoids times `scale`, and
    `bias` fp32 [experts] is added when experts are chosen. `scores` are fp32 [T, experts (+ 1)].
    Raises ValueError naming the argument that does not fit."""
    check_tensor("scores", scores, torch.float32, (None, None))
    rows, num_experts = len(scores), scores.shape[1] - shared
    if not 0 < choices <= num_experts:
        raise ValueError(f"choices: {choices} of {num_experts} experts")
    if bias is not None:
        check_tensor("bias", bias, torch.float32, (num_experts,))
    chosen = torch.empty(rows, choices, dtype=torch.int32, device=scores.device)
    weights = torch.empty(rows, choices + shared, device=scores.device)
    if rows:
        route_kernel[(rows,)](
            scores, bias, chosen, weights, num_experts, scores.stride(0), scale, CHOICES=choices,
            NORMALIZED=normalized, SIGMOID=sigmoid, SHARED=int(shared),
            PLACES=triton.next_power_of_2(choices + shared),
            BLOCK=triton.next_power_of_2(num_experts), num_warps=1, num_stages=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return chosen, weights


def route_reference(
    scores: Tensor,
    choices: int,
    *,
    normalized: bool,
    shared: bool = False,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute `route` in plain torch."""
    routed = scores[:, : scores.shape[1] - shared]
    routed = routed.sigmoid() if sigmoid else routed
    ranked = routed if bias is None else routed + bias
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, :choices]
    if sigmoid:
        weights = routed.gather(1, chosen) * scale
        weights = weights / (weights.sum(1, keepdim=True) / scale + 1e-6) if normalized else weights
    elif normalized:
        weights = routed.gather(1, chosen).softmax(1)
    else:
        weights = routed.softmax(1).gather(1, chosen)
    parts = [weights, scores[:, -1:].sigmoid()] if shared else [weights]
    return chosen.int(), torch.cat(parts, dim=1)


# --- sorting --------------------------------------------------------------------------------------


@jit(do_not_specialize=["num_pairs", "max_tiles"])
def sort_kernel(
    chosen_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_pairs, max_tiles, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the pairs and the tiles of one expert. Every program counts all experts' pairs."""
    expert, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + at, mask=at < num_pairs, other=0)
        counts += tl.histogram(chosen, EXPERTS, mask=at < num_pairs)
    tiles = (counts + (ROWS - 1)) // ROWS
    begin = tl.sum(tl.where(experts < expert, counts, 0), 0)
    end = begin + tl.sum(tl.where(experts == expert, counts, 0), 0)
    tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    place = begin
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + at, mask=at < num_pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
        place += tl.sum(mine, 0)
    for first in range(begin, end, ROWS):
        tl.store(tiles_ptr + tile, expert)
        tl.store(tiles_ptr + max_tiles + tile, first)
        tl.store(tiles_ptr + 2 * max_tiles + tile, tl.minimum(first + ROWS, end))
        tile += 1
    if expert == tl.num_programs(0) - 1:
        tl.store(num_tiles_ptr, tile)


def sort_pairs(chosen: Tensor, num_experts: int, tile_rows: int) -> SortedPairs:
    """Sort the pairs of `chosen` int32 [T, choices], and divide them into tiles of `tile_rows`
    pairs of one expert. Raises ValueError if `chosen` does not fit."""
    check_tensor("chosen", chosen, torch.int32, (None, None))
    pairs = chosen.numel()
    max_tiles = min(pairs, num_experts) + pairs // tile_rows
    sizes = (pairs,), (3, max_tiles), (1,)
    made = SortedPairs(
        *(torch.empty(size, dtype=torch.int32, device=chosen.device) for size in sizes)
    )
    if pairs:
        sort_kernel[(num_experts,)](
            chosen, *made, pairs, max_tiles, ROWS=tile_rows,
            EXPERTS=triton.next_power_of_2(num_experts), BLOCK=_SORT_BLOCK, num_warps=4,
            num_stages=1,
        )  # fmt: skip
    return made


# --- products -------------------------------------------------------------------------------------


@jit
def _gated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=_NAN)
        up = tl.clamp(up, -limit, limit, propagate_nan=_NAN)
        y = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        y = activated(gate, ACTIVATION) * up
    return y


@jit(do_not_specialize=["max_tiles", "limit", "alpha"])
def grouped_kernel(
    x_ptr, weight_ptr, scales_ptr, offsets_ptr, bias_ptr, order_ptr, tiles_ptr, num_tiles_ptr,
    out_ptr, max_tiles, num_outs, num_columns, stride_x, stride_out, limit, alpha,
    CHOICES: tl.constexpr, ACTIVATION: tl.constexpr, FOUR_BIT: tl.constexpr, ROWS: tl.constexpr,
    OUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the results. Programs of one block of weights are adjacent."""
    tile = tl.program_id(0) % max_tiles
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    places = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, ROWS)
    row_valid = places < tl.load(tiles_ptr + 2 * max_tiles + tile)
    pairs = tl.load(order_ptr + places, mask=row_valid, other=0).to(tl.int64)
    first = tl.program_id(0) // max_tiles * OUTS
    outs, columns = first + tl.arange(0, OUTS), tl.arange(0, COLUMNS)
    out_valid, weight_rows = outs < num_outs, expert * num_outs + outs
    x_at = x_ptr + (pairs // CHOICES)[:, None] * stride_x + columns[None, :]
    if scales_ptr is None:
        weight_at = weight_ptr + weight_rows[None, :] * num_columns + columns[:, None]
        acc = dense_sum(
            x_at, weight_at, row_valid[:, None], out_valid[None, :], num_columns, ROWS, OUTS,
            COLUMNS, EVEN,
        )  # fmt: skip
    else:
        acc = quantised_sum(
            x_at, row_valid[:, None], weight_ptr, scales_ptr, offsets_ptr, weight_rows[:, None],
            out_valid[:, None], num_columns, FOUR_BIT, ROWS, OUTS, COLUMNS,
        )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_rows, mask=out_valid, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if ACTIVATION is None:
        out_at = out_ptr + pairs[:, None] * stride_out + outs[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_valid[:, None] & out_valid)
    else:
        gate, up = tl.split(tl.reshape(acc, [ROWS, OUTS // 2, 2]))
        acc = _gated(gate, up, limit, alpha, ACTIVATION)
        outs = first // 2 + tl.arange(0, OUTS // 2)
        out_at = out_ptr + pairs[:, None] * stride_out + outs[None, :]
        valid = row_valid[:, None] & (outs < num_outs // 2)[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid)


def grouped(
    x: Tensor,
    matrices: Matrices,
    pairs: SortedPairs,
    num_experts: int,
    tile: GroupedTile,
    gate: ExpertGate | None = None,
) -> Tensor:
    """Return x @ weight.T + bias for each pair, with the weight of its expert: [pairs, outs], or
    with `gate` the activations of these [pairs, outs / 2]. Sums are fp32 and rounded once, to the
    type of `x`. The rows of `x` are those of the pairs, or each is the row of several pairs.
    `tile` has the rows that `sort_pairs` was given. Raises ValueError naming the argument that does
    not fit."""
    weight, bias = matrices
    codes, scales, offsets = weight if isinstance(weight, Packed) else (weight, None, None)
    stacked, num_columns = weight.shape
    num_outs, num_pairs, (_, max_tiles) = (
        stacked // num_experts,
        len(pairs.order),
        pairs.tiles.shape,
    )
    if stacked % num_experts or (gate and num_outs % 2):
        raise ValueError(f"weight: {list(weight.shape)} for {num_experts} experts")
    if scales is None and (codes.dtype != x.dtype or not codes.is_contiguous()):
        raise ValueError(f"weight: {codes.dtype}; give {x.dtype}, contiguous")
    if scales is not None and num_columns % tile.columns:
        raise ValueError(f"weight: {num_columns} columns; give a multiple of {tile.columns}")
    if x.shape[1] != num_columns or x.stride(1) != 1 or num_pairs % max(len(x), 1):
        raise ValueError(f"x: {list(x.shape)} for {num_pairs} pairs of {num_columns} columns")
    out = torch.empty(
        num_pairs, num_outs // 2 if gate else num_outs, dtype=x.dtype, device=x.device
    )
    if num_pairs:
        activation, limit, alpha = gate or (None, 0.0, 0.0)
        grouped_kernel[(max_tiles * triton.cdiv(num_outs, tile.outs),)](
            x, codes, scales, offsets, bias, *pairs, out, max_tiles, num_outs, num_columns,
            x.stride(0), out.stride(0), limit, alpha, CHOICES=num_pairs // len(x),
            ACTIVATION=activation, FOUR_BIT=codes.dtype == torch.uint8, ROWS=tile.rows,
            OUTS=tile.outs, COLUMNS=tile.columns, EVEN=num_columns % tile.columns == 0,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=scales is None,
        )  # fmt: skip
    return out


@jit
def combine_kernel(
    results_ptr, weights_ptr, shared_ptr, out_ptr, width, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = at < width, tl.zeros([BLOCK], tl.float32)
    weights_ptr += row * (CHOICES + (shared_ptr is not None))
    for i in range(CHOICES):
        result = tl.load(results_ptr + (row * CHOICES + i) * width + at, mask=inside, other=0.0)
        total += tl.load(weights_ptr + i) * result.to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * width + at, mask=inside, other=0.0)
        total += tl.load(weights_ptr + CHOICES) * shared.to(tl.float32)
    tl.store(out_ptr + row * width + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    results: Tensor, weights: Tensor, shared: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return the weighted sums [T, n] of `results` [T * choices, n], in fp32 and rounded once; in
    `out` if given. `weights` are those of `route`, with a shared expert if `shared` [T, n] is
    given. Raises ValueError naming the argument that does not fit."""
    rows, width = len(weights), results.shape[1]
    choices = weights.shape[1] - (shared is not None)
    check_tensor("weights", weights, torch.float32, (rows, None))
    check_tensor("results", results, results.dtype, (rows * choices, width))
    if shared is not None:
        check_tensor("shared", shared, results.dtype, (rows, width))
    if out is None:
        out = torch.empty(rows, width, dtype=results.dtype, device=results.device)
    check_tensor("out", out, results.dtype, (rows, width))
    if rows:
        combine_kernel[(rows, triton.cdiv(width, _COMBINE_BLOCK))](
            results, weights, shared, out, width, CHOICES=choices, BLOCK=_COMBINE_BLOCK,
            num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


# --- reference ------------------------------------------------------------------------------------


def grouped_reference(
    x: Tensor, matrices: Matrices, chosen: Tensor, num_experts: int, gate: ExpertGate | None = None
) -> Tensor:
    """Compute `grouped` in plain torch, pair by pair, for the rows of `chosen` [T, choices]."""
    weight, bias = matrices
    wide = dequantise(weight).to(x.dtype) if isinstance(weight, Packed) else weight
    wide = wide.view(num_experts, -1, x.shape[1]).double()
    experts = chosen.flatten().long()
    rows = x.double().repeat_interleave(len(experts) // len(x), 0)
    y = torch.einsum("pk,pnk->pn", rows, wide[experts])
    if bias is not None:
        y += bias.view(num_experts, -1)[experts]
    if gate is None:
        return y.to(x.dtype)
    first, up = y[:, ::2], y[:, 1::2]
    if gate.activation == "clamped":
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return (first * torch.sigmoid(gate.alpha * first) * (up + 1)).to(x.dtype)
    return activate_reference(torch.cat([first, up], 1).float(), gate.activation).to(x.dtype)
