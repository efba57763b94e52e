"""Batched verification from logits, without a tensor of probabilities.
`cbatch/runtime/sampling/rejection_sampler.py` defines the same on probabilities. Greedy, coupled
and rejection requests with any number of drafts share one batch.

`decide_kernel` accepts the drafts of a request up to the first rejection. The scan has already
drawn the next token, except after the rejection of a sampled draft. Then the next token is drawn
from the residual, for which the rejected draft's row of logits is read again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from triton_kernels.build.check import check_fields, check_tensor
from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import streams as noise
from triton_kernels.sampling import distributions as dist
from triton_kernels.sampling import launch, order, scan
from triton_kernels.sampling.inputs import VERIFY, Distributions, LogitsBatch, Proposals
from triton_kernels.sampling.launch import TILING, CompileOptions, Tiling
from triton_kernels.verification import residual

ACCEPT = tl.constexpr(noise.ACCEPT)
ROWS = 8  # rows of a request that a program handles at a time
DECIDE, ONE_WARP = CompileOptions(4), CompileOptions(1)


class VerifyOutput(NamedTuple):
    """The result: request b emits its first `num_accepted` drafts and the next token."""

    num_accepted: Tensor  # int32 [B]
    next_tokens: Tensor  # int32 [B]: greedy or coupled token, replacement, or bonus token
    finite: Tensor  # int32 [B]: 1 if all logits of its rows were finite; else the result is invalid


@jit
def ratio_accepts(threshold, p):
    """Return whether u * q <= p with u in (0, 1]; p > 0 rejects a token that the target forbids."""
    return (p > 0.0) & (threshold <= p)


@jit(
    do_not_specialize=["num_tiles", "num_dense", "any_drawn", "has_dists"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def decide_kernel(
    batch, starts_ptr, certain_ptr, scanned, dists, q_dists, decision, vocab, stride,
    num_tiles, num_dense, any_drawn, has_dists, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Verify the drafts of a request.

    `has_dists`: 1 if `find_distributions` has stored the distributions of the rows; if 0, those
    needed later are stored here."""
    request = tl.program_id(0)
    mode = tl.load(batch.requests.modes + request)
    count = tl.load(batch.drafts.counts + request)
    start, first_draft = tl.load(starts_ptr + request), tl.load(batch.drafts.starts + request)
    by_rejection = mode >= order.REJECTION
    sampled = by_rejection & (any_drawn != 0) & (tl.load(certain_ptr + request) == 0)
    inverse = order.inverse_of(batch.requests, request)
    seed, position, choice = order.draw_of(batch.noise, request, 0)
    accepted, next_token, finite = count, count * 0, count * 0 + 1
    for first in range(0, count + 1, ROWS):
        depth = first + tl.arange(0, ROWS)
        has_row, has_draft = depth <= count, depth < count
        row = start + tl.where(has_row, depth, 0)
        if has_dists != 0:
            top, mass, cut, token, row_finite = dist.load_dists(dists, row, has_row)
        else:
            top, mass, row_finite, key, _ = dist.combined(
                scanned, row, has_row, num_tiles, inverse, has_row & (mode == order.GREEDY),
                has_row & (mode != order.GREEDY) & ~(has_draft & sampled), TILES,
            )  # fmt: skip
            token, cut = (key & order.ID).to(tl.int32), key * 0 + order.LAST
            stored = has_row & by_rejection
            dist.store_dists(dists, row, top, mass, mass, cut, token, row_finite, stored)
        draft = tl.load(batch.drafts.tokens + first_draft + depth, mask=has_draft, other=0)
        x = _logits_of(
            batch.logits + row.to(tl.int64) * stride + draft, scanned, row,
            has_draft & by_rejection, num_tiles, num_dense, TILES,
        )  # fmt: skip
        p = tl.where(has_draft, dist.chance_of(x, draft, top, mass, cut, inverse), 0.0)
        at = q_dists.floats + (first_draft + depth) * dist.DIST_FIELDS + dist.DIST_CHANCE
        q = tl.load(at, mask=has_draft & sampled, other=1.0)
        purpose = tl.full([ROWS], ACCEPT, tl.int32)
        u = noise_device.uniform(noise_device.scalar_words(seed, position + depth, choice, purpose))
        accepts = tl.where(by_rejection, ratio_accepts(u * q, p), token == draft)
        first_rejected = tl.min(tl.where(has_draft & ~accepts, depth, count), axis=0)
        accepted = tl.minimum(accepted, first_rejected)
        next_token += tl.sum(tl.where(has_row & (depth == accepted), token, 0), axis=0)
        finite = tl.minimum(finite, tl.min(row_finite, axis=0))
    tl.store(decision.num_accepted + request, accepted)
    tl.store(decision.next_tokens + request, next_token)
    tl.store(decision.finite + request, finite)


@jit
def _logits_of(logits_ptr, scanned, row, mask, num_tiles, num_dense, TILES: tl.constexpr):
    """Return the logits of tokens [ROWS], one of each row, from the row or from its overlay."""
    lowest = order.lowest_of(logits_ptr.dtype.element_ty)
    x, _ = order.cleaned(tl.load(logits_ptr, mask=mask, other=lowest))
    tile = tl.arange(0, TILES)[None, :]
    listed = mask[:, None] & (tile >= num_dense) & (tile < num_tiles)
    at = (row[:, None].to(tl.int64) * num_tiles + tile) * scan.TILE_FIELDS + scan.TILE_DRAFT_LOGIT
    shaped = tl.load(scanned.tiles + at, mask=listed, other=order.LOWEST)
    return tl.maximum(x, tl.max(shaped, axis=1))


@jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["certain_ptr"])
def finish_kernel(batch, certain_ptr, decision, keys_ptr, num_tiles, TILES: tl.constexpr):
    """Store the next token of requests whose rejected draft was sampled (see `residual`)."""
    request = tl.program_id(0)
    by_rejection = tl.load(batch.requests.modes + request) >= order.REJECTION
    rejected = tl.load(decision.num_accepted + request) < tl.load(batch.drafts.counts + request)
    if by_rejection & rejected & (tl.load(certain_ptr + request) == 0):
        tile = tl.arange(0, TILES)
        at = keys_ptr + request.to(tl.int64) * num_tiles + tile
        best = tl.max(tl.load(at, mask=tile < num_tiles, other=0), axis=0)
        tl.store(decision.next_tokens + request, residual.token_of(best))


def verify_logits(
    batch: LogitsBatch,
    starts: Tensor,
    proposals: Proposals | None,
    tiling: Tiling = TILING,
    *,
    filtered: bool,
) -> VerifyOutput:
    """Verify the drafts of B requests. Request b has 1 + drafts.counts[b] rows of logits, the first
    of them `starts[b]`, int32 (see `rows_of`).

    Without `proposals` all drafts were chosen with certainty (greedy or n-gram drafts: q is
    one-hot). `filtered` may be False if no sampled request has a filter. If logits are shaped,
    forbidden tokens are marked in `batch.logits`. Raises ValueError naming the invalid argument.
    """
    count, device = len(batch.requests.modes), batch.logits.device
    check_tensor("starts", starts, torch.int32, (count,))
    _check_proposals(batch, proposals)
    certain = None if proposals is None else proposals.certain
    kernel_args = launch.scan_rows(batch, VERIFY, certain, tiling)
    decision = VerifyOutput(
        *(torch.empty(count, dtype=torch.int32, device=device) for _ in VerifyOutput._fields)
    )
    if not count:
        return decision
    dists = Distributions.allocate(len(batch.logits), device)
    if filtered:
        launch.find_distributions(kernel_args, dists)
    kernel_args |= {
        "starts_ptr": starts,
        "dists": dists,
        "q_dists": dists if proposals is None else proposals.dists,
        "decision": decision,
        "has_dists": int(filtered),
        "ROWS": ROWS,
    }
    launch.launch(decide_kernel, (count,), kernel_args, DECIDE)
    if proposals is not None:
        kernel_args |= residual.draw_tokens(kernel_args, proposals, count)
        launch.launch(finish_kernel, (count,), kernel_args, ONE_WARP)
    return decision


def _check_proposals(batch: LogitsBatch, proposals: Proposals | None) -> None:
    if proposals is None:
        return
    count, vocab = len(batch.requests.modes), batch.logits.shape[1]
    check_fields("proposals", proposals, {"certain": (torch.int32, (count,))})
    if proposals.logits.shape[-1] != vocab or proposals.logits.dtype != batch.logits.dtype:
        raise ValueError(
            f"proposals.logits: {proposals.logits.dtype} {list(proposals.logits.shape)} does not "
            f"fit; give {batch.logits.dtype} [M, {vocab}]"
        )
    if (proposals.listed is None) != (batch.shaping is None):
        raise ValueError("proposals.listed: give it where logits are shaped, and only there")
