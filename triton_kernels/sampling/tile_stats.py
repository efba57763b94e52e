"""First pass: every logit is read once. Tiles leave their maximum, their mass and their winner."""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import host as noise
from triton_kernels.sampling import inputs as rows_module
from triton_kernels.sampling import tiles

GREEDY = tl.constexpr(rows_module.GREEDY)
COUPLED_MODE = tl.constexpr(rows_module.COUPLED)
REJECTION = tl.constexpr(rows_module.REJECTION)
BLOCK_MODE = tl.constexpr(rows_module.BLOCK)
DRAFT_PURPOSE = tl.constexpr(noise.DRAFT)
DEPTH_STEP = tl.constexpr(noise.DEPTH_STEP)
COUPLED_PURPOSE = tl.constexpr(noise.COUPLED)


@jit
def is_weighed(modes):
    """Whether drafts are weighed, p against q: modes REJECTION and BLOCK."""
    return (modes == REJECTION) | (modes == BLOCK_MODE)


@jit
def races(modes, depths, PURPOSE: tl.constexpr):
    """Which rows race, and the purpose of their noise. PURPOSE is that of modes REJECTION and BLOCK
    (for drafts of the latter `at_depth`); None, and these rows do not race."""
    purposes = tl.where(modes == COUPLED_MODE, COUPLED_PURPOSE, 0)
    if PURPOSE is None:
        raced = modes == COUPLED_MODE
    else:
        raced = modes != GREEDY
        purposes = tl.where(is_weighed(modes), PURPOSE, purposes)
        if PURPOSE == DRAFT_PURPOSE:
            purposes += tl.where(modes == BLOCK_MODE, DEPTH_STEP * depths, 0)
    return raced, purposes


@jit
def source_of(where, requests, depths, purposes):
    """Where rows draw their noise; see `tiles.exponentials`."""
    return (
        noise_device.load_seeds(where.keys, requests),
        tl.load(where.positions + requests) + depths,
        tl.load(where.choices + requests),
        purposes,
    )


@jit(do_not_specialize=["num_rows", "num_tiles"])
def stats_kernel(
    batch, tile_floats_ptr, tile_ids_ptr, reduced, num_rows, vocab, stride, list_width, num_tiles,
    PURPOSE: tl.constexpr, OF_DRAFTS: tl.constexpr, SHAPED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """tile_floats fp32 [N, tiles, 4]: maximum, mass relative to it, best score, its logit;
    tile_ids int32 [N, tiles, 2]: the winner, and whether every logit was finite. drafted_logits
    fp32 [N]: the shaped logit of the draft that the row decides on, where it has one.

    PURPOSE: the noise with which rows race that are weighed; None, and they do not. OF_DRAFTS: the
    logits are those that drafts were drawn from; of other rows they are not read.
    """
    tile = tl.program_id(1)
    num_dense = tl.cdiv(vocab, BLOCK)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = at < num_rows
    requests = tl.load(batch.rows.requests + at, mask=live, other=0)
    modes = tl.load(batch.requests.modes + requests)
    if OF_DRAFTS:
        live = live & is_weighed(modes)
        if tl.max(live.to(tl.int32), axis=0) == 0:
            return
    shaping = (batch.shaping, list_width)
    out = at.to(tl.int64) * num_tiles + tile
    if tile >= num_dense + tiles.num_sparse(shaping, requests, BLOCK, SHAPED):
        return
    depths = tl.load(batch.rows.depths + at, mask=live, other=0)
    starts = tl.load(batch.drafts.starts + requests)
    offsets = tl.where(live, at, 0).to(tl.int64) * stride
    view = (batch.logits, vocab, offsets, requests, depths, batch.drafts.tokens, starts)
    ids, x, sound = tiles.shaped_tile(view, shaping, tile, num_dense, BLOCK, SHAPED)
    maxima = tl.max(x, axis=1)
    y = tiles.distance(maxima, x, tiles.inverse(tl.load(batch.requests.temperatures + requests)))
    weights = tl.exp(-y)
    tl.store(tile_floats_ptr + out * 4, maxima, mask=live)
    tl.store(tile_floats_ptr + out * 4 + 1, tl.sum(weights, axis=1), mask=live)
    tl.store(tile_ids_ptr + out * 2 + 1, tl.min(sound.to(tl.int32), axis=1), mask=live)

    scores = (x == maxima[:, None]).to(tl.float32)  # of greedy rows
    raced, purposes = races(modes, depths, PURPOSE)
    raced = raced & live
    if tl.max(raced.to(tl.int32), axis=0) > 0:
        source = source_of(batch.noise, requests, depths, purposes)
        e = tiles.exponentials(source, ids, tile, num_dense, BLOCK, SHAPED)
        scores = tl.where(raced[:, None], weights / e, scores)
    best, winner = tiles.winners(scores, ids)
    of_winner = tl.max(tl.where(ids == winner[:, None], x, float("-inf")), axis=1)
    tl.store(tile_floats_ptr + out * 4 + 2, best, mask=live)
    tl.store(tile_floats_ptr + out * 4 + 3, of_winner, mask=live)
    tl.store(tile_ids_ptr + out * 2, winner, mask=live)
    drafted = live & (depths < tl.load(batch.drafts.counts + requests))
    draft = tl.load(batch.drafts.tokens + starts + depths, mask=drafted, other=0)
    of_draft = tl.max(tl.where(ids == draft[:, None], x, float("-inf")), axis=1)
    # Only the tile that has the draft stores: the buffer starts as minus infinity.
    tl.store(reduced.drafted_logits + at, of_draft, mask=drafted & (of_draft > float("-inf")))


@jit
def combine(of_tiles, at, live, greedy, inverse, TILES: tl.constexpr):
    """Maximum, mass, whether all is finite, winner and its logit of each row, from its tiles.
    `of_tiles`: what they left, how many there may be, how many there are."""
    tile_floats_ptr, tile_ids_ptr, num_tiles, used = of_tiles
    tile = tl.arange(0, TILES)[None, :]
    there = (tile < used) & live[:, None]
    entry = at[:, None].to(tl.int64) * num_tiles + tile
    tops = tl.load(tile_floats_ptr + entry * 4, mask=there, other=float("-inf"))
    maxima = tl.max(tops, axis=1)
    scale = tl.exp(-tiles.distance(maxima, tops, inverse))
    sums = tl.load(tile_floats_ptr + entry * 4 + 1, mask=there, other=0.0)
    mass = tl.sum(sums * scale, axis=1)
    scale = tl.where(greedy[:, None], (tops == maxima[:, None]).to(tl.float32), scale)
    scores = tl.load(tile_floats_ptr + entry * 4 + 2, mask=there, other=0.0) * scale
    ids = tl.load(tile_ids_ptr + entry * 2, mask=there, other=tiles.NO_ID)
    best, winner = tiles.winners(scores, ids)
    logits = tl.load(tile_floats_ptr + entry * 4 + 3, mask=there, other=float("-inf"))
    logit = tl.max(tl.where(ids == winner[:, None], logits, float("-inf")), axis=1)
    sound = tl.load(tile_ids_ptr + entry * 2 + 1, mask=there, other=1)
    return maxima, mass, tl.min(sound, axis=1), winner, logit
