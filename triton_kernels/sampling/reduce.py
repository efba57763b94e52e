"""Second pass: what the tiles of a row come to, and what its filters keep. No sort.

Raced rows need the winner among the kept tokens only. The unfiltered winner is it if it is kept,
which one counting pass tells: rank and mass before it, and its distance to the maximum. If it is
not, neither is anything behind it: the tokens before it race again with the same noise. Rows of the
ratio test need the *mass* that is kept: there the cut itself is searched (`cut.py`).

Passes go over the shortlist of a row (`shortlist.py`), or over all of it where there is none: two
launches, each of which leaves the rows of the other alone.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import cut, filters, tiles
from triton_kernels.sampling.tile_stats import GREEDY, combine, is_weighed, races, source_of
from triton_kernels.sampling.tiles import FORBIDDEN


@jit(do_not_specialize=["num_rows", "num_tiles"])
def reduce_kernel(
    batch, tile_floats_ptr, tile_ids_ptr, short_keys_ptr, short_ids_ptr, short_lens_ptr, reduced,
    num_rows, vocab, stride, list_width, num_tiles, PURPOSE: tl.constexpr, OF_DRAFTS: tl.constexpr,
    SHAPED: tl.constexpr, ROWS: tl.constexpr, STATS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, LIST: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """row_floats fp32 [N, 2]: maximum, kept mass relative to it; row_ids int32 [N, 4]: winner,
    cut (key, id), whether every logit was finite. STATS_BLOCK is the tile of the first pass.

    LISTED: of the rows that are filtered, those with a list of at most LIST tokens; else the others
    alone."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = at < num_rows
    at = tl.where(live, at, 0)
    requests = tl.load(batch.rows.requests + at)
    modes = tl.load(batch.requests.modes + requests)
    if OF_DRAFTS:
        live = live & is_weighed(modes)
    limits = filters.limits_of(batch.requests, requests, vocab)
    filtered = live & (modes != GREEDY) & filters.any_filter(limits)
    lens = tl.load(short_lens_ptr + at)
    live = live & ((~filtered | (lens > 0)) if LISTED else (filtered & (lens == 0)))
    if tl.max(live.to(tl.int32), axis=0) == 0:
        return
    depths = tl.load(batch.rows.depths + at)
    inverse = tiles.inverse(tl.load(batch.requests.temperatures + requests))
    shaping = (batch.shaping, list_width)
    used = tl.cdiv(vocab, STATS_BLOCK) + tiles.num_sparse(shaping, requests, STATS_BLOCK, SHAPED)
    of_tiles = (tile_floats_ptr, tile_ids_ptr, num_tiles, used)
    maxima, mass, finite, winner, logit = combine(
        of_tiles, at, live, modes == GREEDY, inverse, TILES
    )
    FORM: tl.constexpr = cut.LISTED if LISTED else SHAPED
    if LISTED:
        view = (short_keys_ptr, vocab, at.to(tl.int64) * LIST, lens, short_ids_ptr)
        longest = tl.max(tl.where(live, lens, 0), axis=0)
        passes = (view, None, maxima, inverse, 0, tl.cdiv(longest, BLOCK))
    else:
        starts = tl.load(batch.drafts.starts + requests)
        first = at.to(tl.int64) * stride
        view = (batch.logits, vocab, first, requests, depths, batch.drafts.tokens, starts)
        num_dense, used = cut.tiles_of_rows(view, shaping, BLOCK, SHAPED)
        passes = (view, shaping, maxima, inverse, num_dense, used)
    raced, purposes = races(modes, depths, PURPOSE)
    source = source_of(batch.noise, requests, depths, purposes)
    asks = live & filtered & (mass > 0.0)
    drawn = (winner, tiles.key_of((maxima - logit) * inverse))
    winner, cut_key, cut_id, mass = _filter(
        passes, source, asks, raced, limits, drawn, mass, BLOCK, FORM
    )
    tl.store(reduced.floats + at * 2, maxima, mask=live)
    tl.store(reduced.floats + at * 2 + 1, mass, mask=live)
    tl.store(reduced.ids + at * 4, winner, mask=live)
    tl.store(reduced.ids + at * 4 + 1, cut_key, mask=live)
    tl.store(reduced.ids + at * 4 + 2, cut_id, mask=live)
    tl.store(reduced.ids + at * 4 + 3, finite, mask=live)


@jit
def _filter(
    passes, source, filtered, raced, limits, drawn, mass, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """Winner, cut and kept mass of each row; `drawn`: the unfiltered winner and its key."""
    winner, winner_key = drawn
    cut_key = tl.full(winner.shape, FORBIDDEN, tl.int32)
    cut_id = tl.zeros_like(winner)
    if tl.max(filtered.to(tl.int32), axis=0) > 0:
        top_k_cut, nucleus = _top_k(passes, filtered, raced, limits, mass, BLOCK, FORM)
        asks = filtered & ~raced
        if tl.max(asks.to(tl.int32), axis=0) > 0:
            cut_key, cut_id, mass = _cut(
                passes, asks, top_k_cut, nucleus, limits, mass, BLOCK, FORM
            )
        asks = filtered & raced
        if tl.max(asks.to(tl.int32), axis=0) > 0:
            kept = (limits[0].to(tl.float32), nucleus, limits[2])
            winner = _race_until_kept(passes, source, asks, winner, winner_key, kept, BLOCK, FORM)
    return winner, cut_key, cut_id, mass


@jit
def _top_k(passes, filtered, raced, limits, mass, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """The cut of top_k where it is needed, and the mass that top_p allows before a token: a share
    of what top_k leaves."""
    top_k, top_p, _, vocab = limits
    has_top_p = top_p < float("inf")
    asks = filtered & (top_k < vocab) & (has_top_p | ~raced)
    everything = (tl.full(top_k.shape, FORBIDDEN, tl.int32), top_k * 0)
    end = cut.search(passes, everything, asks, top_k.to(tl.float32), True, BLOCK, FORM)
    if tl.max(asks.to(tl.int32), axis=0) > 0:
        mass = tl.where(asks, cut.mass_before(passes, end, BLOCK, FORM), mass)
    return end, filters.nucleus_of(limits, mass)


@jit
def _cut(passes, asks, end, nucleus, limits, mass, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """The cut (key, id) of all filters, and the mass before it."""
    _, top_p, last_key, _ = limits
    cut_key, cut_id = cut.search(
        passes, end, asks & (top_p < float("inf")), nucleus, False, BLOCK, FORM
    )
    shorter = asks & (last_key < cut_key)
    cut_key, cut_id = tl.where(shorter, last_key + 1, cut_key), tl.where(shorter, 0, cut_id)
    kept = cut.mass_before(passes, (cut_key, cut_id), BLOCK, FORM)
    return cut_key, cut_id, tl.where(asks, kept, mass)


@jit
def _count_and_mass(passes, end, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Number of tokens and mass before a cut, fp32 [ROWS] each (2**24 tokens count exactly)."""
    count = tl.zeros_like(passes[2])
    mass = tl.zeros_like(passes[2])
    for tile in range(passes[5]):
        ids, keys, weights = cut.ordered_tile(passes, tile, BLOCK, FORM)
        in_front = tiles.before(keys, ids, end[0], end[1])
        count += tl.sum(in_front.to(tl.float32), axis=1)
        mass += tl.sum(tl.where(in_front, weights, 0.0), axis=1)
    return count, mass


@jit
def _race_until_kept(
    passes, source, asks, winner, winner_key, limits, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """The winner among kept tokens. `limits`: count and mass that must not be reached before it,
    and the last key that is kept. The likeliest token is kept always, and each winner lies before
    the last, or a row (of a list gone wrong) asks no more: so this ends."""
    top_k, nucleus, last_key = limits
    while tl.max(asks.to(tl.int32), axis=0) > 0:
        count, mass = _count_and_mass(passes, (winner_key, winner), BLOCK, FORM)
        kept = (count < top_k) & (mass < nucleus) & (winner_key <= last_key)
        asks = asks & ~(kept | (count == 0.0))
        if tl.max(asks.to(tl.int32), axis=0) > 0:
            again, again_key = _race(passes, source, (winner_key, winner), BLOCK, FORM)
            nearer = (again_key < winner_key) | ((again_key == winner_key) & (again < winner))
            asks = asks & nearer & (again != tiles.NO_ID)
            winner = tl.where(asks, again, winner)
            winner_key = tl.where(asks, again_key, winner_key)
    return winner


@jit
def _race(passes, source, end, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Id and key of the winner among the tokens before a cut."""
    best = tl.zeros_like(passes[2])
    winner = tl.full(end[1].shape, tiles.NO_ID, tl.int32)
    winner_key = tl.zeros_like(end[0])
    for tile in range(passes[5]):
        ids, keys, weights = cut.ordered_tile(passes, tile, BLOCK, FORM)
        if FORM == cut.LISTED:
            e = tiles.exponentials_of(source, ids)
        else:
            e = tiles.exponentials(source, ids, tile, passes[4], BLOCK, FORM)
        raced = weights / e
        in_front = tiles.before(keys, ids, end[0], end[1])
        score, id = tiles.winners(tl.where(in_front, raced, -1.0), ids)
        key = tl.max(tl.where(ids == id[:, None], keys, 0), axis=1)
        better = (score > best) | ((score == best) & (score >= 0) & (id < winner))
        best = tl.where(better, score, best)
        winner = tl.where(better, id, winner)
        winner_key = tl.where(better, key, winner_key)
    return winner, winner_key
