"""Between the passes: the likeliest tokens of filtered rows, gathered so that few are walked.

What a filter keeps is a prefix of a row's order, and mostly a short one. Several programs share a
row: they measure how many tokens, of what mass, lie before each of a few ends; then they gather
what lies before the nearest end that is sure to hold every cut. Rows for which no end is, or whose
list would be too long, are walked whole.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import cut, filters, tiles
from triton_kernels.sampling.tile_stats import GREEDY, combine, is_weighed

# Keys of y = 1.5, 3, 4.5, 6, 8, 10.5, 14 and 20.
END_KEYS = tl.constexpr(
    (
        0x3FC00000, 0x40400000, 0x40900000, 0x40C00000,
        0x41000000, 0x41280000, 0x41600000, 0x41A00000,
    )
)  # fmt: skip
ENDS = tl.constexpr(8)
# Sums in another order differ by less: what holds a mass and this much more, holds it in any order.
SLACK = tl.constexpr(1.0 + 1e-5)


@jit
def _end_keys():
    """The ends, int32 [1, ENDS]."""
    lanes = tl.arange(0, ENDS)[None, :]
    keys = lanes * 0
    for i in tl.static_range(ENDS):
        keys = tl.where(lanes == i, END_KEYS[i], keys)
    return keys


@jit
def _share(used, SHARES: tl.constexpr):
    """The tiles of this program, of `used`."""
    each = tl.cdiv(used, SHARES)
    first = tl.program_id(1) * each
    return first, tl.minimum(first + each, used)


@jit
def _decides(counts, masses, limits, mass):
    """Whether the tokens before each end hold every cut of a row, [ROWS, ENDS]."""
    top_k, top_p, last_key = limits[0][:, None], limits[1][:, None], limits[2][:, None]
    by_count, by_mass = top_k < limits[3], top_p < float("inf")
    # The nucleus is a share of what top_k leaves: a list that holds the one holds the other.
    held = (counts >= top_k.to(tl.float32)) & by_count
    nucleus = filters.nucleus_of(limits, mass)[:, None]
    held = held | (by_mass & ~by_count & (masses >= nucleus * SLACK))
    # Nothing behind min_p is kept; but the mass that top_k leaves may lie there.
    return held | ((_end_keys() > last_key) & ~(by_count & by_mass))


@jit
def _asked(batch, num_rows, vocab, OF_DRAFTS: tl.constexpr, ROWS: tl.constexpr):
    """Rows of this program, which of them are filtered, their requests, depths and limits."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = at < num_rows
    at = tl.where(live, at, 0)
    requests = tl.load(batch.rows.requests + at)
    modes = tl.load(batch.requests.modes + requests)
    limits = filters.limits_of(batch.requests, requests, vocab)
    asks = live & (modes != GREEDY) & filters.any_filter(limits)
    if OF_DRAFTS:
        asks = asks & is_weighed(modes)
    return at, asks, requests, tl.load(batch.rows.depths + at), limits


@jit(do_not_specialize=["num_rows", "num_tiles"])
def shortlist_kernel(
    batch, tile_floats_ptr, tile_ids_ptr, measured_ptr, short_keys_ptr, short_ids_ptr,
    short_lens_ptr, num_rows, vocab, stride, list_width, num_tiles, OF_DRAFTS: tl.constexpr,
    SHAPED: tl.constexpr, ROWS: tl.constexpr, STATS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, SHARES: tl.constexpr, LIST: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    """First measured fp32 [N, SHARES, 2, ENDS]: number and mass of the tokens of a share before
    each end. Then, GATHERS, short_keys and short_ids int32 [N, LIST], in the order of tiles and
    lanes, and short_lens int32 [N]: how many, 0 where a row has no list."""
    at, asks, requests, depths, limits = _asked(batch, num_rows, vocab, OF_DRAFTS, ROWS)
    shaping = (batch.shaping, list_width)
    if tl.max(asks.to(tl.int32), axis=0) == 0:
        return
    inverse = tiles.inverse(tl.load(batch.requests.temperatures + requests))
    used = tl.cdiv(vocab, STATS_BLOCK) + tiles.num_sparse(shaping, requests, STATS_BLOCK, SHAPED)
    of_tiles = (tile_floats_ptr, tile_ids_ptr, num_tiles, used)
    maxima, mass, _, _, _ = combine(of_tiles, at, asks, ~asks, inverse, TILES)
    view = (
        batch.logits, vocab, at.to(tl.int64) * stride, requests, depths, batch.drafts.tokens,
        tl.load(batch.drafts.starts + requests),
    )  # fmt: skip
    num_dense, used = cut.tiles_of_rows(view, shaping, BLOCK, SHAPED)
    passes = (view, shaping, maxima, inverse, num_dense, used)
    if GATHERS:
        end, count, place = _choose(
            measured_ptr, at, asks & (mass > 0.0), limits, mass, SHARES, LIST
        )
        if tl.program_id(1) == 0:
            tl.store(short_lens_ptr + at, count, mask=asks)
        if tl.max(end, axis=0) > 0:
            to = (short_keys_ptr, short_ids_ptr, at.to(tl.int64) * LIST + place)
            _gather(passes, end, to, SHARES, BLOCK, SHAPED)
    else:
        counts, masses = _measure(passes, SHARES, BLOCK, SHAPED)
        out = (at[:, None].to(tl.int64) * SHARES + tl.program_id(1)) * (2 * ENDS)
        out += tl.arange(0, ENDS)[None, :]
        tl.store(measured_ptr + out, counts, mask=asks[:, None])
        tl.store(measured_ptr + out + ENDS, masses, mask=asks[:, None])


@jit
def _measure(passes, SHARES: tl.constexpr, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    """Number and mass of the tokens of a share before each end, [ROWS, ENDS] each."""
    ROWS: tl.constexpr = passes[2].shape[0]
    lanes = tl.arange(0, ENDS)[None, :]
    counts = tl.zeros([ROWS, ENDS], tl.float32)
    masses = tl.zeros([ROWS, ENDS], tl.float32)
    first, stop = _share(passes[5], SHARES)
    for tile in range(first, stop):
        _, keys, weights = cut.ordered_tile(passes, tile, BLOCK, SHAPED)
        for i in tl.static_range(ENDS):
            inside = keys < END_KEYS[i]
            count = tl.sum(inside.to(tl.float32), axis=1)[:, None]
            mass = tl.sum(tl.where(inside, weights, 0.0), axis=1)[:, None]
            counts += tl.where(lanes == i, count, 0.0)
            masses += tl.where(lanes == i, mass, 0.0)
    return counts, masses


@jit
def _choose(measured_ptr, at, asks, limits, mass, SHARES: tl.constexpr, LIST: tl.constexpr):
    """The nearest end that decides a row, 0 if none does in LIST tokens; the number of tokens
    before it, and of those in the shares before this one. [ROWS] each."""
    shares, lanes = tl.arange(0, SHARES)[None, :, None], tl.arange(0, ENDS)[None, None, :]
    entry = (at[:, None, None].to(tl.int64) * SHARES + shares) * (2 * ENDS) + lanes
    mask = asks[:, None, None] & (shares >= 0)
    of_shares = tl.load(measured_ptr + entry, mask=mask, other=0.0)
    counts = tl.sum(of_shares, axis=1)
    masses = tl.sum(tl.load(measured_ptr + entry + ENDS, mask=mask, other=0.0), axis=1)
    decides = _decides(counts, masses, limits, mass) & (counts <= LIST) & asks[:, None]
    ends = tl.where(decides, _end_keys(), tiles.FORBIDDEN)
    end = tl.min(ends, axis=1)
    chosen = decides & (ends == end[:, None])
    count = tl.sum(tl.where(chosen, counts, 0.0), axis=1).to(tl.int32)
    before = tl.sum(tl.where(shares < tl.program_id(1), of_shares, 0.0), axis=1)
    place = tl.sum(tl.where(chosen, before, 0.0), axis=1).to(tl.int32)
    return tl.where(end < tiles.FORBIDDEN, end, 0), count, place


@jit
def _gather(passes, end, to, SHARES: tl.constexpr, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    """Keys and ids of the tokens of a share before `end`; `to`: where they go, and [ROWS] from
    which place on."""
    keys_ptr, ids_ptr, place = to
    first, stop = _share(passes[5], SHARES)
    for tile in range(first, stop):
        ids, keys, _ = cut.ordered_tile(passes, tile, BLOCK, SHAPED)
        chosen = (keys < end[:, None]) & (end > 0)[:, None]
        at = place[:, None] + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
        tl.store(keys_ptr + at, keys, mask=chosen)
        tl.store(ids_ptr + at, ids, mask=chosen)
        place += tl.sum(chosen.to(tl.int32), axis=1)
