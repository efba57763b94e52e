"""The residual max(0, c p - q), from which the token that replaces a sampled draft is drawn.

c is the joint ratio of the block's earlier drafts, else 1. A program handles a tile of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import host as noise
from triton_kernels.sampling import launch, order, scan
from triton_kernels.sampling import laws as law
from triton_kernels.sampling.inputs import Proposals

RESIDUAL = tl.constexpr(noise.RESIDUAL)
SCORE = tl.constexpr(1 << 31)  # factor of the score in a key: above the id, below MARK
ALL_IDS = tl.constexpr((1 << 31) - 1)
MARK = tl.constexpr(1 << 62)


@jit
def residual_of(p, q):
    """Return the residual, not normalised (Leviathan et al. 2023, section 2.3)."""
    return tl.maximum(p - q, 0.0)


@jit
def token_of(key):
    return ((key & ALL_IDS) ^ ALL_IDS).to(tl.int32)


@jit(
    do_not_specialize=["num_tiles", "num_dense", "races"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def residual_kernel(
    batch, starts_ptr, certain_ptr, scanned, overlay, laws, q_logits_ptr, q_listed_ptr, q_laws,
    decision, ratios_ptr, masses_ptr, keys_ptr, vocab, stride, q_stride, list_width, logits_step,
    q_step, num_tiles, num_dense, races, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Store one value for a tile of the residual. For rows of blocks, it is the mass, fp32 [N,
    tiles]. With `races`, it is the key of the winner, int64 [B, tiles], for the first rejected row
    of each request."""
    place, tile, by_row = tl.program_id(0), tl.program_id(1), races == 0
    request = tl.load(batch.rows.requests + place, mask=by_row, other=place)
    depth = tl.load(batch.rows.depths + place, mask=by_row, other=0)
    depth += tl.load(decision.num_accepted + request, mask=races != 0, other=0)
    mode = tl.load(batch.requests.modes + request)
    asks = tl.where(by_row, (mode == order.BLOCK_MODE) & (depth > 0), mode >= order.REJECTION)
    asks = asks & (depth < tl.load(batch.drafts.counts + request))
    row = tl.load(starts_ptr + request) + depth
    if asks & (tl.load(certain_ptr + request) == 0):
        q_row = (tl.load(batch.drafts.starts + request) + depth).to(tl.int64)
        inverse = order.inverse_of(batch.requests, request)
        piece = tile * PIECES + tl.arange(0, PIECES)[:, None]
        ids = piece * PIECE + tl.arange(0, PIECE)[None, :]
        if tile < num_dense:
            inside = ids < vocab
            x = _dense(batch.logits + row.to(tl.int64) * stride + ids, inside)
            q_x = _dense(q_logits_ptr + q_row * q_stride + ids, inside)
        else:
            entry = ids - num_dense * PIECES * PIECE
            top_at = (row.to(tl.int64) * num_tiles + tile) * scan.TILE_FIELDS + scan.TILE_TOP
            used = tl.where(tl.load(scanned.tiles + top_at) > order.LOWEST, list_width, 0)
            held = entry < used
            listed = overlay.ids + row.to(tl.int64) * list_width + entry
            ids = tl.load(listed, mask=held, other=0)
            shaped = overlay.logits + row.to(tl.int64) * logits_step + entry
            x = tl.load(shaped, mask=held, other=order.LOWEST)
            q_x = tl.load(q_listed_ptr + q_row * q_step + entry, mask=held, other=order.LOWEST)
        top, mass, cut, _, _ = law.load_laws(laws, row, True)
        p = law.chance_of(x, ids, top, mass, cut, inverse)
        if mode == order.BLOCK_MODE:
            p *= tl.load(ratios_ptr + row)
        top, mass, cut, _, _ = law.load_laws(q_laws, q_row, True)
        rest = residual_of(p, law.chance_of(q_x, ids, top, mass, cut, inverse))
        if races == 0:
            total = tl.sum(tl.sum(rest, axis=1), axis=0)
            tl.store(masses_ptr + row.to(tl.int64) * num_tiles + tile, total)
        else:
            # Where p and q are nearly equal, rounding may leave no residual at all. Then the token
            # is drawn from p.
            some = tl.max(tl.max(rest, axis=1), axis=0) > 0.0
            score = tl.where(some, rest, p)
            seed, position, choice = order.draw_of(batch.noise, request, depth)
            purpose = depth * 0 + RESIDUAL
            if tile < num_dense:
                group = piece * (PIECE // 4) + tl.arange(0, PIECE // 4)[None, :]
                words = noise_device.run_words(
                    seed, group, position, choice, purpose, PIECES, PIECE
                )
            else:
                words = noise_device.words_of(seed, ids, position, choice, purpose)
            score /= noise_device.exponential(words)
            best = tl.max(tl.max(score, axis=1), axis=0)
            token = tl.min(tl.min(tl.where(score == best, ids, ALL_IDS), axis=1), axis=0)
            key = order.key_of(best) * SCORE + (token ^ ALL_IDS) + tl.where(some, MARK, 0)
            tl.store(keys_ptr + request.to(tl.int64) * num_tiles + tile, key)


@jit
def _dense(logits_ptr, inside):
    lowest = order.lowest_of(logits_ptr.dtype.element_ty)
    x, _ = order.cleaned(tl.load(logits_ptr, mask=inside, other=lowest))
    return x


def arguments(values: dict[str, Any], proposals: Proposals, num_requests: int) -> dict[str, Any]:
    """Return the further arguments of `residual_kernel`; `values`: see `kernel.verify_logits`."""
    num_rows, num_tiles = values["scanned"].winners.shape
    new = values["scanned"].winners.new_empty
    listed = proposals.listed
    return {
        "q_logits_ptr": proposals.logits,
        "q_listed_ptr": values["scanned"].tiles if listed is None else listed,
        "q_stride": proposals.logits.stride(0),
        "q_step": 0 if listed is None else listed.stride(0),
        "masses_ptr": new((num_rows, num_tiles), dtype=torch.float32),
        "keys_ptr": new((num_requests, num_tiles)),
    }


def measure(values: dict[str, Any]) -> None:
    """Compute the residual masses for block verification."""
    _launch(values | {"races": 0}, values["masses_ptr"])


def race(values: dict[str, Any]) -> None:
    """Draw from the residual of the first rejected row of each request."""
    _launch(values | {"races": 1}, values["keys_ptr"])


def _launch(values: dict[str, Any], out: Tensor) -> None:
    """Launch a program for each element of `out`."""
    launch.launch(residual_kernel, tuple(out.shape), values, values["tiling"].residual)
