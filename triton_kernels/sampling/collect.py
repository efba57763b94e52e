"""Kernels that list the likeliest tokens of filtered rows before `distributions_kernel` runs.

That kernel has one program for a row, which reads piece after piece of a flat row while others are
idle. Here a program handles a tile. The order in which tiles append to a row's list affects no
result: the kernel only sums integers over the list, and takes minima.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import distributions as dist
from triton_kernels.sampling import lists, order, scan
from triton_kernels.sampling.order import LAST, LOWEST


@jit(
    do_not_specialize=["num_tiles", "purpose", "any_drawn"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def first_end_kernel(
    batch, certain_ptr, scanned, scratch, vocab, num_tiles, purpose, any_drawn,
    TILES: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, ALL_PIECES: tl.constexpr,
):  # fmt: skip
    """Store the end before which a row's tokens are listed, 0 without a filter, and an empty
    list."""
    row = tl.program_id(0)
    facts = dist.facts_of(
        batch, certain_ptr, scanned, row, vocab, num_tiles, purpose, any_drawn, TILES
    )
    request, _, inverse, top, mass, _, winner, is_filtered, exact, _ = facts
    end = winner * 0
    if is_filtered:
        pieces = dist.pieces_of(scanned, row, num_tiles, top, inverse, PIECES, ALL_PIECES)
        limits = dist.limits_of(batch.requests, request, vocab)
        has_both = limits[1] & (limits[2] < float("inf"))  # top_k and top_p
        bound = tl.where(has_both, LAST, dist.bound_of(limits[3], exact, winner))
        end = tl.minimum(dist.guess_end(pieces, limits, mass, PIECE), bound)
    at = scratch.collected + row * lists.COLLECTED_FIELDS
    tl.store(at + lists.COLLECTED_END, end)
    for field in tl.static_range(lists.COLLECTED_LENGTH, lists.COLLECTED_FIELDS):
        tl.store(at + field, end * 0)


@jit(do_not_specialize=["num_tiles", "num_dense"])
def collect_kernel(
    batch, overlay, scanned, scratch, vocab, stride, list_width, logits_step, num_tiles, num_dense,
    TILES: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Append the tokens of a tile before the row's end to its list, and add up their number, mass
    and number near the end. Tokens beyond the room of the list only count."""
    row, tile = tl.program_id(0), tl.program_id(1)
    at = scratch.collected + row * lists.COLLECTED_FIELDS
    end = tl.load(at + lists.COLLECTED_END)
    inverse = order.inverse_of(batch.requests, tl.load(batch.rows.requests + row))
    tiles = tl.arange(0, TILES)
    fields = scanned.tiles + row.to(tl.int64) * num_tiles * scan.TILE_FIELDS + scan.TILE_TOP
    tops = tl.load(fields + tiles * scan.TILE_FIELDS, mask=tiles < num_tiles, other=LOWEST)
    top, tile_top = tl.max(tops, 0), tl.load(fields + tile * scan.TILE_FIELDS)
    if (order.key_of((top - tile_top) * inverse) << 32) < end:
        view = lists.view_of(
            batch, overlay, row, vocab, stride, list_width, logits_step, num_dense * PIECES, top,
            inverse,
        )  # fmt: skip
        piece = (tile * PIECES + tl.arange(0, PIECES))[:, None]
        codes, inside, sums, _, _ = lists.measured(view, piece, end * 0, end, PIECE)
        ones = inside.to(tl.int32)
        counts = tl.sum(ones, axis=1)
        length = tl.sum(counts, axis=0).to(tl.int64)
        mass, num_near = lists.totals(sums)
        first = tl.atomic_add(at + lists.COLLECTED_LENGTH, length, sem="relaxed")
        tl.atomic_add(at + lists.COLLECTED_MASS, mass, sem="relaxed")
        tl.atomic_add(at + lists.COLLECTED_NEAR, num_near.to(tl.int64), sem="relaxed")
        place = first + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(ones, 1) - 1
        listed = scratch.codes + row.to(tl.int64) * LIST
        tl.store(listed + place, codes, mask=inside & (place < LIST))
