"""The residual max(0, p - q): the token that replaces a rejected draft is drawn from it.

p and q are the probabilities of a token under the target and under the draft.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import streams as noise
from triton_kernels.sampling import distributions as dist
from triton_kernels.sampling import launch, order, scan
from triton_kernels.sampling.inputs import Proposals

RESIDUAL = tl.constexpr(noise.RESIDUAL)
# A key orders the tokens of a draw: the score's bits above the inverted id, so that ties go to the
# lowest id. FROM_RESIDUAL above both puts tokens with a residual before all others.
SCORE = tl.constexpr(1 << 31)
ALL_IDS = tl.constexpr((1 << 31) - 1)
FROM_RESIDUAL = tl.constexpr(1 << 62)


@jit
def residual_of(p, q):
    """Return the residual, not normalised (Leviathan et al. 2023, section 2.3)."""
    return tl.maximum(p - q, 0.0)


@jit
def token_of(key):
    return ((key & ALL_IDS) ^ ALL_IDS).to(tl.int32)


@jit(
    do_not_specialize=["num_tiles", "num_dense"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def residual_kernel(
    batch, starts_ptr, certain_ptr, scanned, overlay, dists, q_logits_ptr, q_listed_ptr, q_dists,
    decision, keys_ptr, vocab, stride, q_stride, list_width, logits_step, q_step, num_tiles,
    num_dense, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Compute the residual of one tile of the row of a request's first rejected draft, if that was
    sampled. Store the tile's largest key, int64 [B, tiles]."""
    request, tile = tl.program_id(0), tl.program_id(1)
    depth = tl.load(decision.num_accepted + request)
    needed = tl.load(batch.requests.modes + request) >= order.REJECTION
    needed = needed & (depth < tl.load(batch.drafts.counts + request))
    row = tl.load(starts_ptr + request) + depth
    if needed & (tl.load(certain_ptr + request) == 0):
        q_row = (tl.load(batch.drafts.starts + request) + depth).to(tl.int64)
        inverse = order.inverse_of(batch.requests, request)
        piece = tile * PIECES + tl.arange(0, PIECES)[:, None]
        ids = piece * PIECE + tl.arange(0, PIECE)[None, :]
        if tile < num_dense:
            inside = ids < vocab
            p_logits = _load_dense(batch.logits + row.to(tl.int64) * stride + ids, inside)
            q_logits = _load_dense(q_logits_ptr + q_row * q_stride + ids, inside)
        else:
            entry = ids - num_dense * PIECES * PIECE
            max_at = (row.to(tl.int64) * num_tiles + tile) * scan.TILE_FIELDS + scan.TILE_TOP
            has_entries = tl.load(scanned.tiles + max_at) > order.LOWEST
            valid = entry < tl.where(has_entries, list_width, 0)
            ids = tl.load(overlay.ids + row.to(tl.int64) * list_width + entry, mask=valid, other=0)
            listed_logits = overlay.logits + row.to(tl.int64) * logits_step + entry
            p_logits = tl.load(listed_logits, mask=valid, other=order.LOWEST)
            q_logits = tl.load(
                q_listed_ptr + q_row * q_step + entry, mask=valid, other=order.LOWEST
            )
        top, mass, cut, _, _ = dist.load_dists(dists, row, True)
        p = dist.chance_of(p_logits, ids, top, mass, cut, inverse)
        top, mass, cut, _, _ = dist.load_dists(q_dists, q_row, True)
        residual = residual_of(p, dist.chance_of(q_logits, ids, top, mass, cut, inverse))
        # If p and q are nearly equal, rounding may leave no residual: p then replaces it.
        has_residual = tl.max(tl.max(residual, axis=1), axis=0) > 0.0
        score = tl.where(has_residual, residual, p)
        seed, position, choice = order.draw_of(batch.noise, request, depth)
        stream = depth * 0 + RESIDUAL
        if tile < num_dense:
            group = piece * (PIECE // 4) + tl.arange(0, PIECE // 4)[None, :]
            words = noise_device.run_words(seed, group, position, choice, stream, PIECES, PIECE)
        else:
            words = noise_device.words_of(seed, ids, position, choice, stream)
        score /= noise_device.exponential(words)
        best = tl.max(tl.max(score, axis=1), axis=0)
        token = tl.min(tl.min(tl.where(score == best, ids, ALL_IDS), axis=1), axis=0)
        key = order.key_of(best) * SCORE + (token ^ ALL_IDS)
        key += tl.where(has_residual, FROM_RESIDUAL, 0)
        tl.store(keys_ptr + request.to(tl.int64) * num_tiles + tile, key)


@jit
def _load_dense(logits_ptr, inside):
    lowest = order.lowest_of(logits_ptr.dtype.element_ty)
    x, _ = order.cleaned(tl.load(logits_ptr, mask=inside, other=lowest))
    return x


def draw_tokens(
    kernel_args: dict[str, Any], proposals: Proposals, num_requests: int
) -> dict[str, Any]:
    """Draw from the residual after the first rejected draft of each request. Return the arguments
    added to those of `kernel.verify_logits`."""
    winners, listed = kernel_args["scanned"].winners, proposals.listed
    keys = winners.new_empty((num_requests, winners.shape[1]))
    added = {
        "q_logits_ptr": proposals.logits,
        "q_listed_ptr": kernel_args["scanned"].tiles if listed is None else listed,
        "q_stride": proposals.logits.stride(0),
        "q_step": 0 if listed is None else listed.stride(0),
        "keys_ptr": keys,
    }
    options = kernel_args["tiling"].residual
    launch.launch(residual_kernel, tuple(keys.shape), kernel_args | added, options)
    return added
