"""The cut of a filter (top-k by count, top-p by mass) found by counting passes, without a sort.

Three keys are tried at once: number or mass of the tokens before them says between which two the
cut lies. Each pass also narrows the interval to the keys that occur in it, which is soon one of
them, however close the others are. The nucleus is that of Holtzman et al. 2020, "The curious case
of neural text degeneration", section 3.1.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import tiles

# Keys of y = 3, 8 and 20: most cuts lie between the first two.
FIRST_KEYS = tl.constexpr((0x40400000, 0x41000000, 0x41A00000))
LISTED = tl.constexpr(2)


@jit
def tiles_of_rows(view, shaping, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    """Dense tiles of whole rows, and all of them."""
    num_dense = tl.cdiv(view[1], BLOCK)
    return num_dense, num_dense + tiles.num_sparse(shaping, view[3], BLOCK, SHAPED)


@jit
def ordered_tile(passes, tile, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Ids, keys and weights of a tile, [ROWS, BLOCK] each. `passes`: view and shaping (see
    `tiles.shaped_tile`), maxima and inverse temperatures [ROWS], number of dense and of all tiles.
    FORM: whether logits are shaped; or LISTED, and the view is of shortlists: keys, vocabulary
    size, where lists begin, how long they are, ids.
    """
    view, shaping, maxima, inverse, num_dense, used = passes
    if FORM == LISTED:
        lanes = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside, at = lanes < view[3][:, None], view[2][:, None] + lanes
        keys = tl.load(view[0] + at, mask=inside, other=tiles.FORBIDDEN)
        ids = tl.load(view[4] + at, mask=inside, other=tiles.NO_ID)
        y = keys.to(tl.float32, bitcast=True)
    else:
        ids, x, _ = tiles.shaped_tile(view, shaping, tile, num_dense, BLOCK, FORM)
        y = tiles.distance(maxima, x, inverse)
        keys = tiles.key_of(y)
    return ids, keys, tl.exp(-y)


@jit
def mass_before(passes, end, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Mass before the cut `end`, [ROWS]."""
    mass = tl.zeros_like(passes[2])
    for tile in range(passes[5]):
        ids, keys, weights = ordered_tile(passes, tile, BLOCK, FORM)
        mass += tl.sum(tl.where(tiles.before(keys, ids, end[0], end[1]), weights, 0.0), axis=1)
    return mass


@jit
def search(
    passes, within, asks, limit, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """Cut of the longest prefix of the tokens before the cut `within` such that the number or mass
    of what lies before its last token is less than `limit` fp32 [ROWS], > 0. `within` where a row
    does not ask."""
    # The last kept key is in [low, high): `low` has less than the limit before it, `high` has not.
    low = tl.zeros_like(within[0])
    high = within[0] + (within[1] > 0).to(tl.int32)
    first = tl.minimum(low + FIRST_KEYS[0], high)
    second = tl.minimum(low + FIRST_KEYS[1], high)
    third = tl.minimum(low + FIRST_KEYS[2], high)
    while tl.max((asks & (high - low > 1)).to(tl.int32), axis=0) > 0:
        at_first, at_second, at_third, lowest, highest = _measure(
            passes, within, (low, high), (first, second, third), BY_COUNT, BLOCK, FORM
        )
        low = tl.maximum(low, tl.minimum(lowest, high - 1))
        high = tl.minimum(high, tl.maximum(highest, low) + 1)
        low, high = _narrowed(low, high, first, at_first < limit)
        low, high = _narrowed(low, high, second, at_second < limit)
        low, high = _narrowed(low, high, third, at_third < limit)
        quarter = (high - low) // 4
        first = low + tl.maximum(quarter, 1)
        second = low + tl.maximum(2 * quarter, 1)
        third = low + tl.maximum(3 * quarter, 1)
    end_id = tl.zeros_like(low)
    if tl.max(asks.to(tl.int32), axis=0) > 0:
        end_id = _first_id_out(passes, within, asks, low, limit, BY_COUNT, BLOCK, FORM)
    return tl.where(asks, low, within[0]), tl.where(asks, end_id, within[1])


@jit
def _narrowed(low, high, key, is_below):
    """The interval after learning whether the last kept key is at or above `key`."""
    low = tl.where(is_below, tl.maximum(low, tl.minimum(key, high - 1)), low)
    return low, tl.where(is_below, high, tl.minimum(high, tl.maximum(key, low + 1)))


@jit
def _measure(
    passes, within, bounds, tried, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """Number or mass before each of three keys, and the least and greatest key within bounds."""
    at_first = tl.zeros_like(passes[2])
    at_second = tl.zeros_like(passes[2])
    at_third = tl.zeros_like(passes[2])
    lowest = tl.full(bounds[0].shape, tiles.FORBIDDEN, tl.int32)
    highest = tl.zeros_like(bounds[0])
    for tile in range(passes[5]):
        ids, keys, weights = ordered_tile(passes, tile, BLOCK, FORM)
        eligible = tiles.before(keys, ids, within[0], within[1])
        weights = tl.where(eligible, 1.0 if BY_COUNT else weights, 0.0)
        at_first += tl.sum(tl.where(keys < tried[0][:, None], weights, 0.0), axis=1)
        at_second += tl.sum(tl.where(keys < tried[1][:, None], weights, 0.0), axis=1)
        at_third += tl.sum(tl.where(keys < tried[2][:, None], weights, 0.0), axis=1)
        eligible = eligible & (keys >= bounds[0][:, None]) & (keys < bounds[1][:, None])
        least = tl.min(tl.where(eligible, keys, tiles.FORBIDDEN), axis=1)
        lowest = tl.minimum(lowest, least)
        highest = tl.maximum(highest, tl.max(tl.where(eligible, keys, 0), axis=1))
    return at_first, at_second, at_third, lowest, highest


@jit
def _first_id_out(
    passes, within, asks, edge, limit, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Of the tokens with key `edge`, the lowest ids stay: the first id that does not."""
    before_edge = tl.zeros_like(passes[2])
    ties = tl.zeros_like(passes[2])
    for tile in range(passes[5]):
        ids, keys, weights = ordered_tile(passes, tile, BLOCK, FORM)
        eligible = tiles.before(keys, ids, within[0], within[1])
        weights = tl.where(eligible, 1.0 if BY_COUNT else weights, 0.0)
        before_edge += tl.sum(tl.where(keys < edge[:, None], weights, 0.0), axis=1)
        ties += tl.sum((eligible & (keys == edge[:, None])).to(tl.float32), axis=1)
    each = tl.full(limit.shape, 1.0, tl.float32)
    if not BY_COUNT:
        each = tl.exp(-edge.to(tl.float32, bitcast=True))
    stay = tl.maximum(tl.ceil((limit - before_edge) / each), 1.0)
    # Unknown is the least id with `stay` ties below it, in (low, high]; mostly all of them stay.
    low = tl.zeros_like(edge)
    high = tl.where(edge == within[0], within[1], tiles.NO_ID)
    below_low = tl.zeros_like(stay)
    asks = asks & (stay < ties)
    high = tl.where(asks, tl.minimum(high, passes[0][1]), high)
    while tl.max((asks & (high - low > 1)).to(tl.int32), axis=0) > 0:
        middle = tl.where(asks, low + (high - low) // 2, low)
        below = below_low + _ties_between(passes, within, edge, asks, low, middle, BLOCK, FORM)
        enough = below >= stay
        high = tl.where(asks & enough, middle, high)
        low = tl.where(asks & ~enough, middle, low)
        below_low = tl.where(enough, below_low, below)
    return high


@jit
def _ties_between(passes, within, edge, asks, low, high, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Number of tokens with key `edge` and low <= id < high: of dense tiles, only those in which
    these ids lie are read."""
    first, dense = 0, 0
    if FORM != LISTED:
        first = tl.min(tl.where(asks, low, tiles.NO_ID), axis=0) // BLOCK
        dense = tl.cdiv(tl.max(tl.where(asks, high, 0), axis=0), BLOCK) - first
    count = tl.zeros_like(passes[2])
    for i in range(dense + passes[5] - passes[4]):
        tile = tl.where(i < dense, first + i, passes[4] + i - dense)
        ids, keys, _ = ordered_tile(passes, tile, BLOCK, FORM)
        there = tiles.before(keys, ids, within[0], within[1]) & (keys == edge[:, None])
        there = there & (ids >= low[:, None]) & (ids < high[:, None])
        count += tl.sum(there.to(tl.float32), axis=1)
    return count
