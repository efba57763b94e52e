"""Batched verification from logits: what `verify.py` defines on probabilities, without any tensor
of them. Greedy, coupled and rejection requests of any k share one batch.

`reduce` has left winners, masses and cuts of every row. One program then walks the drafts of many
requests (of those of mode BLOCK those of `block_kernel.py` judge anew); requests of modes REJECTION
and BLOCK draw one more token, from the residual of their first rejected row or from the row behind
all accepted ones, and from no other.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.case import KernelCase
from triton_kernels.build.check import check_fields, check_tensor
from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import host as noise
from triton_kernels.sampling import launch, tiles
from triton_kernels.sampling.inputs import LogitsBatch, Proposals
from triton_kernels.sampling.launch import TILING, Reduced, Tiling
from triton_kernels.sampling.tile_stats import REJECTION, is_weighed, source_of
from triton_kernels.verification import block_kernel
from triton_kernels.verification.laws import chance, laws_of_tile

ACCEPT = tl.constexpr(noise.ACCEPT)
RESIDUAL = tl.constexpr(noise.RESIDUAL)
BONUS = tl.constexpr(noise.BONUS)
REQUESTS_A_PROGRAM = 64
ACCEPT_WARPS = 2


class VerifyOutput(NamedTuple):
    """Request b emits its first `num_accepted` drafts, then the next token, if it is `finite`."""

    num_accepted: Tensor  # int32 [B]
    next_tokens: Tensor  # int32 [B]: the target's own, the replacement, or the bonus
    finite: Tensor  # int32 [B]: 1 if every logit of its rows was; otherwise the verdict is void


@jit
def _accepts(threshold, p):
    """u * q <= p with u in (0, 1]; p > 0 keeps a token that the target forbids out for good."""
    return (p > 0.0) & (threshold <= p)


@jit
def _residual(p, q):
    """What replaces a rejected draft, not normalised (Leviathan et al. 2023, section 2.3)."""
    return tl.maximum(p - q, 0.0)


@jit
def _accept_kernel(
    batch, starts_ptr, proposals, reduced, q_reduced, decision, num_requests,
    PROPOSED: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    live = request < num_requests
    request = tl.where(live, request, 0)
    count = tl.load(batch.drafts.counts + request)
    start, draft_start = tl.load(starts_ptr + request), tl.load(batch.drafts.starts + request)
    ratio = tl.load(batch.requests.modes + request) == REJECTION
    inverse = tiles.inverse(tl.load(batch.requests.temperatures + request))
    seeds, choices = (
        noise_device.load_seeds(batch.noise.keys, request),
        tl.load(batch.noise.choices + request),
    )
    position = tl.load(batch.noise.positions + request)
    accepted = tl.zeros([REQUESTS], tl.int32)
    finite = tl.load(reduced.ids + 4 * start + 3)
    for j in range(tl.max(count, axis=0)):
        there = j < count
        row = tl.where(there, start + j, start)
        finite &= tl.load(reduced.ids + 4 * tl.where(there, row + 1, start) + 3)
        draft = tl.load(batch.drafts.tokens + draft_start + j, mask=there, other=0)
        own = tl.load(reduced.ids + 4 * row)
        p = chance(reduced.floats, reduced.ids, reduced.drafted_logits, row, draft, inverse, there)
        purposes = tl.full([REQUESTS], ACCEPT, tl.int32)
        words = noise_device.scalar_words(seeds, position + j, choices, purposes)
        threshold = noise_device.uniform(words)
        if PROPOSED:
            unsure = there & ratio & (tl.load(proposals.certain + request) == 0)
            row = draft_start + j
            q = chance(
                q_reduced.floats,
                q_reduced.ids,
                q_reduced.drafted_logits,
                row,
                draft,
                inverse,
                unsure,
            )
            threshold = tl.where(unsure, threshold * q, threshold)
        passes = tl.where(ratio, _accepts(threshold, p), own == draft)
        accepted += (there & passes & (accepted == j)).to(tl.int32)
    tl.store(decision.num_accepted + request, accepted, mask=live)
    tl.store(
        decision.next_tokens + request, tl.load(reduced.ids + 4 * (start + accepted)), mask=live
    )
    tl.store(decision.finite + request, finite, mask=live)


@jit(do_not_specialize=["num_tiles"])
def _replace_kernel(
    batch, starts_ptr, proposals, reduced, q_reduced, decision, tile_scores_ptr, tile_ids_ptr,
    ratios_ptr, num_requests, vocab, stride, q_stride, list_width, num_tiles,
    PROPOSED: tl.constexpr, BLOCKS: tl.constexpr, SHAPED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """tile_scores fp32 [B, tiles, 2] and tile_ids int32 [B, tiles, 2]: who wins the race of the
    residual max(0, p - q), or of p behind accepted drafts, and who wins that of p in any case. With
    BLOCKS p is scaled by the joint ratio of what was accepted, `ratios` fp32 [rows of logits]."""
    tile = tl.program_id(1)
    num_dense = tl.cdiv(vocab, BLOCK)
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = request < num_requests
    request = tl.where(live, request, 0)
    live = live & is_weighed(tl.load(batch.requests.modes + request))
    if tl.max(live.to(tl.int32), axis=0) == 0:
        return
    shaping = (batch.shaping, list_width)
    if tile >= num_dense + tiles.num_sparse(shaping, request, BLOCK, SHAPED):
        return
    depth = tl.load(decision.num_accepted + request)
    row = tl.load(starts_ptr + request) + depth
    rejected = depth < tl.load(batch.drafts.counts + request)
    ids, p, q = laws_of_tile(
        batch, proposals, reduced, q_reduced, request, row, depth, live & rejected, tile, vocab,
        stride, q_stride, shaping, PROPOSED, SHAPED, BLOCK,
    )  # fmt: skip
    if BLOCKS:
        p = tl.load(ratios_ptr + row)[:, None] * p
    purposes = tl.where(rejected, RESIDUAL, BONUS)
    source = source_of(batch.noise, request, depth, purposes)
    e = tiles.exponentials(source, ids, tile, num_dense, BLOCK, SHAPED)
    best, winner = tiles.winners(_residual(p, q) / e, ids)
    best_of_p, winner_of_p = tiles.winners(p / e, ids)
    out = (request.to(tl.int64) * num_tiles + tile) * 2
    tl.store(tile_scores_ptr + out, best, mask=live)
    tl.store(tile_scores_ptr + out + 1, best_of_p, mask=live)
    tl.store(tile_ids_ptr + out, winner, mask=live)
    tl.store(tile_ids_ptr + out + 1, winner_of_p, mask=live)


@jit(do_not_specialize=["vocab", "num_tiles"])
def _finish_kernel(
    batch, decision, tile_scores_ptr, tile_ids_ptr, num_requests, vocab, num_tiles,
    SHAPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The next token of requests whose drafts are weighed, from the tiles of `_replace_kernel`."""
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = request < num_requests
    request = tl.where(live, request, 0)
    live = live & is_weighed(tl.load(batch.requests.modes + request))
    used = tl.cdiv(vocab, BLOCK)
    if SHAPED:
        used += tl.cdiv(tl.max(tl.load(batch.shaping.num_listed + request), axis=0), BLOCK)
    tile = tl.arange(0, TILES)[None, :]
    there = live[:, None] & (tile < used)
    entry = (request[:, None].to(tl.int64) * num_tiles + tile) * 2
    scores = tl.load(tile_scores_ptr + entry, mask=there, other=0.0)
    best, winner = tiles.winners(scores, tl.load(tile_ids_ptr + entry, mask=there, other=0))
    scores = tl.load(tile_scores_ptr + entry + 1, mask=there, other=0.0)
    _, of_p = tiles.winners(scores, tl.load(tile_ids_ptr + entry + 1, mask=there, other=0))
    # Round-off where p and q are nearly equal may leave no residual: then p itself is the law.
    tl.store(decision.next_tokens + request, tl.where(best > 0.0, winner, of_p), mask=live)


def verify_logits(
    batch: LogitsBatch,
    starts: Tensor,
    proposals: Proposals | None,
    tiling: Tiling = TILING,
    *,
    blocks: bool,
) -> VerifyOutput:
    """Verify the drafts of B requests, 1 + drafts.counts[b] rows of logits each, the first of them
    `starts[b]` int32 [B] (see `rows_of`). Without `proposals` every draft was chosen with certainty
    (greedy or n-gram drafts: q is one-hot). Not `blocks`: no request of mode BLOCK has drafts.
    Raises ValueError naming the argument that is wrong.
    """
    count, device = len(batch.requests.modes), batch.logits.device
    check_tensor("starts", starts, torch.int32, (count,))
    reduced = launch.reduce_tiles(batch, None, tiling)
    q = None if proposals is None else _reduce_proposals(batch, proposals, tiling)
    decision = VerifyOutput(
        *(torch.empty(count, dtype=torch.int32, device=device) for _ in VerifyOutput._fields)
    )
    if not count:
        return decision
    common = launch.arguments(batch) | {
        "starts_ptr": starts,
        "proposals": proposals,
        "reduced": reduced,
        "q_reduced": q,
        "decision": decision,
        "num_requests": count,
        "q_stride": 0 if proposals is None else proposals.logits.stride(0),
        "PROPOSED": proposals is not None,
        "BLOCKS": blocks,
        "ratios_ptr": None,
        "REQUESTS": REQUESTS_A_PROGRAM,
        **launch.shape(batch, tiling),
    }
    few = common | {"num_warps": ACCEPT_WARPS}
    launch.launch(_accept_kernel, (triton.cdiv(count, REQUESTS_A_PROGRAM),), few)
    if blocks:
        common |= block_kernel.judge_blocks(common, tiling)
    _replace(common, tiling)
    return decision


def _reduce_proposals(batch: LogitsBatch, proposals: Proposals, tiling: Tiling) -> Reduced:
    count, vocab = len(batch.requests.modes), batch.logits.shape[1]
    check_fields("proposals", proposals, {"certain": (torch.int32, (count,))})
    if proposals.logits.shape[-1] != vocab:
        raise ValueError(
            f"proposals.logits: {list(proposals.logits.shape)} does not fit; give [M, {vocab}]"
        )
    drawn_from = batch._replace(logits=proposals.logits, rows=proposals.rows)
    return launch.reduce_tiles(drawn_from, None, tiling, of_drafts=True)


def _replace(common: dict[str, Any], tiling: Tiling) -> None:
    batch, count = common["batch"], common["num_requests"]
    num_tiles, device = launch.num_tiles_of(batch, tiling), batch.logits.device
    shape, blocks = (count, num_tiles, 2), triton.cdiv(count, tiling.rows)
    common = common | {
        "tile_scores_ptr": torch.empty(shape, dtype=torch.float32, device=device),
        "tile_ids_ptr": torch.empty(shape, dtype=torch.int32, device=device),
        "num_tiles": num_tiles,
        "TILES": triton.next_power_of_2(num_tiles),
    }
    launch.launch(_replace_kernel, (blocks, num_tiles), common)
    launch.launch(_finish_kernel, (blocks,), common)


def cases() -> list[KernelCase]:
    """bf16 logits; with and without shaping, with and without proposals."""
    drawn: dict[str, Any] = {"proposals": launch.PROPOSALS, "q_reduced": launch.REDUCED}
    types = drawn | {"decision": VerifyOutput(*["*i32"] * 3), "ratios_ptr": "*fp32"}
    types |= {"masses_ptr": "*fp32"}
    found, accepting = [], []
    for shaped, proposed in itertools.product((True, False), repeat=2):
        made = {"SHAPED": shaped, "ROWS": 1, "BLOCK": TILING.block}
        how = {"PROPOSED": proposed, **({} if proposed else dict.fromkeys(drawn))}
        drafts = f"{'drawn' if proposed else 'certain'} drafts"
        config = f"{'shaped' if shaped else 'plain'} {drafts}"
        replace = made | how | {"BLOCKS": proposed}
        found.append(launch.case_of("verify_replace", config, _replace_kernel, replace, **types))
        found += block_kernel.cases(config, drafts, made, how, types)
        if proposed:
            made |= {"TILES": 64}
            found.append(launch.case_of("verify_finish", config, _finish_kernel, made, **types))
        if shaped:
            how |= {"REQUESTS": REQUESTS_A_PROGRAM}
            case = launch.case_of("verify_accept", drafts, _accept_kernel, how, **types)
            accepting.insert(0, case._replace(num_warps=ACCEPT_WARPS))
    return found + accepting
