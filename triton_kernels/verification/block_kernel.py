"""Blocks of drafts judged from logits: what `block_reference.py` defines on probabilities.

Three passes over requests of mode BLOCK: joint ratios c along the drafts of each; the mass R of
max(0, c p - q) behind each draft but the last, tile by tile; then the coins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.case import KernelCase
from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import host as noise
from triton_kernels.sampling import launch, tiles
from triton_kernels.sampling.launch import Tiling
from triton_kernels.sampling.tile_stats import BLOCK_MODE, DEPTH_STEP
from triton_kernels.verification.laws import chance, laws_of_tile

ACCEPT = tl.constexpr(noise.ACCEPT)
REQUESTS_A_PROGRAM = 64
FEW_WARPS = 2


@jit
def _weights(
    batch, proposals, reduced, q_reduced, request, row, draft_row, inverse, there,
    PROPOSED: tl.constexpr,
):  # fmt: skip
    """p and q of the drafts that rows decide on; q is 1 where they were chosen with certainty."""
    draft = tl.load(batch.drafts.tokens + draft_row, mask=there, other=0)
    p = chance(reduced.floats, reduced.ids, reduced.drafted_logits, row, draft, inverse, there)
    q = tl.full(p.shape, 1.0, tl.float32)
    if PROPOSED:
        unsure = there & (tl.load(proposals.certain + request) == 0)
        drawn = chance(
            q_reduced.floats,
            q_reduced.ids,
            q_reduced.drafted_logits,
            draft_row,
            draft,
            inverse,
            unsure,
        )
        q = tl.where(unsure, drawn, q)
    return p, q


@jit
def _blocks(batch, starts_ptr, num_requests, REQUESTS: tl.constexpr):
    """The requests of a program: their number, whether they are of mode BLOCK, how many drafts
    these have, first rows of logits and of drafts, and one over the temperature."""
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    live = request < num_requests
    request = tl.where(live, request, 0)
    live = live & (tl.load(batch.requests.modes + request) == BLOCK_MODE)
    count = tl.where(live, tl.load(batch.drafts.counts + request), 0)
    start, draft_start = tl.load(starts_ptr + request), tl.load(batch.drafts.starts + request)
    inverse = tiles.inverse(tl.load(batch.requests.temperatures + request))
    return request, live, count, start, draft_start, inverse


@jit
def _joint_ratio(weight, q):
    """min(1, c p / q) of `weight` c p; 0 where the target forbids the draft."""
    ratio = tl.where(weight >= q, 1.0, weight / tl.where(q > 0.0, q, 1.0))
    return tl.where(weight > 0.0, ratio, 0.0)


@jit
def _says_so(u, mass, ratio):
    """u <= h = R / (R + 1 - c), with u in (0, 1]."""
    return u * (mass + (1.0 - ratio)) <= mass


@jit
def ratios_kernel(
    batch, starts_ptr, proposals, reduced, q_reduced, ratios_ptr, num_requests,
    PROPOSED: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """ratios fp32 [rows of logits]: c of what stands before each row of a block; others stay."""
    request, live, count, start, draft_start, inverse = _blocks(
        batch, starts_ptr, num_requests, REQUESTS
    )
    ratio = tl.full([REQUESTS], 1.0, tl.float32)
    for j in range(tl.max(count, axis=0)):
        there = j < count
        row = tl.where(there, start + j, start)
        draft_row = tl.where(there, draft_start + j, draft_start)
        p, q = _weights(
            batch, proposals, reduced, q_reduced, request, row, draft_row, inverse, there, PROPOSED
        )
        ratio = _joint_ratio(ratio * p, q)
        tl.store(ratios_ptr + row + 1, ratio, mask=there)


@jit(do_not_specialize=["num_rows", "num_tiles"])
def masses_kernel(
    batch, starts_ptr, proposals, reduced, q_reduced, ratios_ptr, masses_ptr, num_rows, vocab,
    stride, q_stride, list_width, num_tiles, PROPOSED: tl.constexpr, SHAPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """masses fp32 [rows of logits, tiles]: of max(0, c p - q), in rows of a block before its last
    draft and behind its first; others stay."""
    tile = tl.program_id(1)
    num_dense = tl.cdiv(vocab, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    row = tl.where(live, row, 0)
    request = tl.load(batch.rows.requests + row)
    depth = tl.load(batch.rows.depths + row)
    live = live & (tl.load(batch.requests.modes + request) == BLOCK_MODE) & (depth > 0)
    live = live & (depth < tl.load(batch.drafts.counts + request))
    # Rows of padding name a request, too.
    live = live & (row == tl.load(starts_ptr + request) + depth)
    if tl.max(live.to(tl.int32), axis=0) == 0:
        return
    shaping = (batch.shaping, list_width)
    if tile >= num_dense + tiles.num_sparse(shaping, request, BLOCK, SHAPED):
        return
    _, p, q = laws_of_tile(
        batch, proposals, reduced, q_reduced, request, row, depth, live, tile, vocab, stride,
        q_stride, shaping, PROPOSED, SHAPED, BLOCK,
    )  # fmt: skip
    rest = tl.maximum(tl.load(ratios_ptr + row)[:, None] * p - q, 0.0)
    out = row.to(tl.int64) * num_tiles + tile
    tl.store(masses_ptr + out, tl.sum(rest, axis=1), mask=live)


@jit(do_not_specialize=["num_tiles"])
def coins_kernel(
    batch, starts_ptr, proposals, reduced, q_reduced, ratios_ptr, masses_ptr, decision,
    num_requests, num_tiles, PROPOSED: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """The number accepted of requests of mode BLOCK: up to the last draft whose coin says so."""
    request, live, count, start, draft_start, inverse = _blocks(
        batch, starts_ptr, num_requests, REQUESTS
    )
    seeds = noise_device.load_seeds(batch.noise.keys, request)
    choices = tl.load(batch.noise.choices + request)
    position = tl.load(batch.noise.positions + request)
    accepted = tl.zeros([REQUESTS], tl.int32)
    for j in range(tl.max(count, axis=0)):
        there = j < count
        row = tl.where(there, start + j, start)
        draft_row = tl.where(there, draft_start + j, draft_start)
        p, q = _weights(
            batch, proposals, reduced, q_reduced, request, row, draft_row, inverse, there, PROPOSED
        )
        weight = tl.load(ratios_ptr + row) * p
        purposes = tl.full([REQUESTS], ACCEPT, tl.int32) + DEPTH_STEP * j
        u = noise_device.uniform(noise_device.scalar_words(seeds, position + j, choices, purposes))
        mass = tl.zeros([REQUESTS], tl.float32)
        behind = there & (j + 1 < count)
        for tile in range(num_tiles):
            at = (row + 1).to(tl.int64) * num_tiles + tile
            mass += tl.load(masses_ptr + at, mask=behind, other=0.0)
        ratio = tl.load(ratios_ptr + row + 1, mask=there, other=0.0)
        passes = tl.where(behind, _says_so(u, mass, ratio), u * q <= weight)
        accepted = tl.where(there & (weight > 0.0) & passes, j + 1, accepted)
    tl.store(decision.num_accepted + request, accepted, mask=live)


def judge_blocks(common: dict[str, Any], tiling: Tiling) -> dict[str, Tensor]:
    """Overwrites the number accepted of requests of mode BLOCK. `common` are the arguments of
    `verify_logits`; returns the joint ratio before each row of logits, 1 outside of blocks."""
    batch, count = common["batch"], common["num_requests"]
    num_rows, num_tiles = len(batch.logits), launch.num_tiles_of(batch, tiling)
    device = batch.logits.device
    ratios = torch.ones(num_rows, dtype=torch.float32, device=device)
    common = common | {
        "ratios_ptr": ratios,
        "masses_ptr": torch.zeros((num_rows, num_tiles), dtype=torch.float32, device=device),
        "num_rows": num_rows,
        "num_tiles": num_tiles,
        "REQUESTS": REQUESTS_A_PROGRAM,
    }
    few, requests = common | {"num_warps": FEW_WARPS}, triton.cdiv(count, REQUESTS_A_PROGRAM)
    launch.launch(ratios_kernel, (requests,), few)
    launch.launch(masses_kernel, (triton.cdiv(num_rows, tiling.rows), num_tiles), common)
    launch.launch(coins_kernel, (requests,), few)
    return {"ratios_ptr": ratios}


def cases(
    config: str, drafts: str, made: dict[str, Any], how: dict[str, Any], types: dict[str, Any]
) -> list[KernelCase]:
    """As those of `verify_logits`, of which these are a part."""
    found = [launch.case_of("verify_masses", config, masses_kernel, made | how, **types)]
    if made["SHAPED"]:
        how = how | {"REQUESTS": REQUESTS_A_PROGRAM}
        for name, kernel in (("verify_ratios", ratios_kernel), ("verify_blocks", coins_kernel)):
            case = launch.case_of(name, drafts, kernel, how, **types)
            found.append(case._replace(num_warps=FEW_WARPS))
    return found
