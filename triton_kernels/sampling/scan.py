"""The kernel that reads every logit once, with a program for each tile of a row.

A tile is [PIECES, PIECE] tokens. A program stores the maximum and the mass of its tile, and the
winner of its race. For filtered rows it also stores the maximum and mass of each piece. From these
`distributions` chooses the pieces that it must read again.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.sampling import order
from triton_kernels.sampling.order import LOWEST

# Fields of a tile in `Scanned.tiles`.
TILE_TOP = tl.constexpr(0)  # the maximum
TILE_MASS = tl.constexpr(1)  # relative to the maximum; NaN if some logit is not finite
TILE_WINNER_LOGIT = tl.constexpr(2)
TILE_DRAFT_LOGIT = tl.constexpr(3)  # in a tile of listed tokens: the logit of the row's draft
TILE_FIELDS = tl.constexpr(4)


@jit(
    do_not_specialize=["num_tiles", "purpose", "any_drawn", "shaped"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def scan_kernel(
    batch, certain_ptr, plain_ptr, scanned, vocab, stride, num_tiles, purpose, any_drawn, shaped,
    PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Scan a tile. If `shaped`, `plain_ptr` int32 [B, words] is read, and tokens that are not plain
    are forbidden in memory; `shape` has listed them before."""
    row, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(batch.rows.requests + row)
    depth = tl.load(batch.rows.depths + row)
    piece = tile * PIECES + tl.arange(0, PIECES)[:, None]
    ids = piece * PIECE + tl.arange(0, PIECE)[None, :]
    inside = ids < vocab
    at = batch.logits + row.to(tl.int64) * stride + ids
    lowest = order.lowest_of(batch.logits.dtype.element_ty)
    raw = tl.load(at, mask=inside, other=lowest)
    x, sound = order.cleaned(raw)
    if shaped != 0:
        word = piece * (PIECE // 32) + tl.arange(0, PIECE // 32)[None, :]
        words = plain_ptr + request.to(tl.int64) * tl.cdiv(vocab, 32) + word
        words = tl.load(words, mask=word < tl.cdiv(vocab, 32), other=-1)
        bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        plain = tl.reshape(bits, [PIECES, PIECE]) != 0
        forbidden = tl.full([PIECES, PIECE], lowest, tl.float32).to(raw.dtype)
        tl.store(at, forbidden, mask=inside & sound & ~plain)
        x = tl.where(plain, x, LOWEST)
    raced, stream, excluded = order.race_of(batch, certain_ptr, request, depth, purpose, any_drawn)
    seed, position, choice = order.draw_of(batch.noise, request, depth)
    top, y = store_sums(batch, scanned, row, tile, request, x, sound, vocab, num_tiles)
    if raced:
        group = piece * (PIECE // 4) + tl.arange(0, PIECE // 4)[None, :]
        words = noise_device.run_words(seed, group, position, choice, stream, PIECES, PIECE)
        key = order.race_key(noise_device.exponential(words), y, ids)
        key = tl.where((ids == excluded) | ~inside, order.NEVER, key)
        store_winner(scanned, row * num_tiles + tile, key, ids, x)
    elif tl.load(batch.requests.modes + request) == order.GREEDY:
        store_winner(scanned, row * num_tiles + tile, order.code_of(y, ids), ids, x)


@jit
def store_sums(batch, scanned, row, tile, request, x, sound, vocab, num_tiles):
    """Store the maximum and masses of a tile. Return the maximum, and the distances y from it."""
    PIECES: tl.constexpr = x.shape[0]
    piece_tops = tl.max(x, axis=1)
    top = tl.max(piece_tops, axis=0)
    y = (top - x) * order.inverse_of(batch.requests, request)
    masses = tl.sum(tl.where(sound, order.weight_of(y), float("nan")), axis=1)
    tile_index = row.to(tl.int64) * num_tiles + tile
    tl.store(scanned.tiles + tile_index * TILE_FIELDS + TILE_TOP, top)
    tl.store(scanned.tiles + tile_index * TILE_FIELDS + TILE_MASS, tl.sum(masses, axis=0))
    if order.is_filtered(batch.requests, request, vocab):
        pieces = tile_index * PIECES + tl.arange(0, PIECES)
        tl.store(scanned.piece_tops + pieces, piece_tops)
        tl.store(scanned.piece_masses + pieces, masses)
    return top, y


@jit
def store_winner(scanned, tile_index, key, ids, x):
    """Store the token of a tile that has the least key, and its logit."""
    best = tl.min(tl.min(key, axis=1), axis=0)
    winner_logits = tl.where(ids == (best & order.ID), x, LOWEST)
    tl.store(scanned.winners + tile_index, best)
    tl.store(
        scanned.tiles + tile_index.to(tl.int64) * TILE_FIELDS + TILE_WINNER_LOGIT,
        tl.max(tl.max(winner_logits, axis=1), axis=0),
    )
