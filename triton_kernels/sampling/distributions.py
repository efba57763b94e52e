"""The kernel that finds the distribution of a row after temperature and filters, without a sort.
One program handles a row, after the scan.

The cut of a filter is the least code that has top_k tokens, or the mass of the nucleus, before it
(Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1). The
maximum and mass of each piece, which the scan stored, give an estimate of where the cut lies: the
*end*. Only pieces with tokens before the end are read again, usually few. These tokens are summed
and listed (`lists`), and the cut is found in the list by bisection.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import lists, order, scan
from triton_kernels.sampling.order import LAST, LOWEST

# The first end is chosen among distances GUESS_STEP apart, by GUESSES bisections.
GUESS_STEP = tl.constexpr(1.0 / 16)
FARTHEST_GUESS = tl.constexpr(512)
GUESSES = tl.constexpr(10)
# Share of a piece's other tokens that a guess assumes to be as likely as a token at the end.
REST_SHARE = tl.constexpr(0.1)

# Fields of a row of `Distributions.floats`.
DIST_MAX = tl.constexpr(0)
DIST_MASS = tl.constexpr(1)
DIST_CHANCE = tl.constexpr(2)
DIST_FIELDS = tl.constexpr(3)


@jit
def combined(scanned, rows, live, num_tiles, inverse, greedy, raced, TILES: tl.constexpr):
    """Return, of rows [R] from their tiles: maximum, mass, whether all is finite, the race key of
    the winner (see `order.race_key`) and its logit."""
    tile = tl.arange(0, TILES)[None, :]
    in_range = live[:, None] & (tile < num_tiles)
    at = rows[:, None].to(tl.int64) * num_tiles + tile
    tiles = scanned.tiles + at * scan.TILE_FIELDS
    tops = tl.load(tiles + scan.TILE_TOP, mask=in_range, other=LOWEST)
    masses = tl.load(tiles + scan.TILE_MASS, mask=in_range, other=0.0)
    top = tl.max(tops, axis=1)
    distance = (top[:, None] - tops) * inverse
    finite_tiles = masses == masses
    mass = tl.sum(tl.where(finite_tiles, masses, 0.0) * order.weight_of(distance), axis=1)
    in_range = in_range & (greedy | raced)[:, None]
    keys = tl.load(scanned.winners + at, mask=in_range, other=order.NEVER)
    scores = order.distance_of(keys)
    raced_scores = scores * tl.exp2(tl.minimum(distance * order.LOG2_E, 126.0))
    scores = tl.where(greedy[:, None], scores + distance, raced_scores)
    keys = tl.where(in_range, order.code_of(scores, keys & order.ID), order.NEVER)
    best = tl.min(keys, axis=1)
    winner_logits = tl.load(tiles + scan.TILE_WINNER_LOGIT, mask=in_range, other=LOWEST)
    logit = tl.max(tl.where(keys == best[:, None], winner_logits, LOWEST), axis=1)
    finite = tl.min(finite_tiles.to(tl.int32), axis=1)
    return top, tl.where(top > LOWEST, mass, 0.0), finite, best, logit


@jit
def store_dists(dists, out, top, mass, chance, cut, token, finite, mask):
    tl.store(dists.floats + out * DIST_FIELDS + DIST_MAX, top, mask=mask)
    tl.store(dists.floats + out * DIST_FIELDS + DIST_MASS, mass, mask=mask)
    tl.store(dists.floats + out * DIST_FIELDS + DIST_CHANCE, chance, mask=mask)
    tl.store(dists.cuts + out, cut, mask=mask)
    tl.store(dists.tokens + 2 * out, token, mask=mask)
    tl.store(dists.tokens + 2 * out + 1, finite, mask=mask)


@jit
def load_dists(dists, rows, mask):
    """Return maximum, mass, cut, drawn token and whether all was finite, of rows [R]."""
    floats = dists.floats + rows * DIST_FIELDS
    return (
        tl.load(floats + DIST_MAX, mask=mask, other=0.0),
        tl.load(floats + DIST_MASS, mask=mask, other=1.0),
        tl.load(dists.cuts + rows, mask=mask, other=0),
        tl.load(dists.tokens + 2 * rows, mask=mask, other=0),
        tl.load(dists.tokens + 2 * rows + 1, mask=mask, other=1),
    )


@jit
def chance_of(x, ids, top, mass, cut, inverse):
    """Return the probabilities of tokens from their logits."""
    y = (top - x) * inverse
    kept = order.code_of(y, ids) < cut
    return tl.where(kept, order.weight_of(y) / tl.where(mass > 0.0, mass, 1.0), 0.0)


@jit(
    do_not_specialize=["num_tiles", "num_dense", "purpose", "any_drawn", "first_out", "out_step"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def distributions_kernel(
    batch, certain_ptr, overlay, scanned, scratch, dists, vocab, stride, list_width, logits_step,
    num_tiles, num_dense, purpose, any_drawn, first_out, out_step, TILES: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, ALL_PIECES: tl.constexpr, CHUNK: tl.constexpr,
    LIST: tl.constexpr, COLLECTS: tl.constexpr,
):  # fmt: skip
    """Store the distribution of row i at place `first_out + i * out_step`. Tiles from `num_dense`
    on hold listed tokens. COLLECTS: the tokens before a guessed end are listed already."""
    row = tl.program_id(0)
    facts = facts_of(batch, certain_ptr, scanned, row, vocab, num_tiles, purpose, any_drawn, TILES)
    request, depth, inverse, top, mass, finite, winner, is_filtered, exact, drawn = facts
    cut = winner * 0 + LAST
    if is_filtered:
        view = lists.view_of(
            batch, overlay, row, vocab, stride, list_width, logits_step, num_dense * PIECES, top,
            inverse,
        )  # fmt: skip
        pieces = pieces_of(scanned, row, num_tiles, top, inverse, PIECES, ALL_PIECES)
        memory = (
            scratch.pieces + row.to(tl.int64) * num_tiles * PIECES,
            scratch.codes + row.to(tl.int64) * LIST,
        )
        race = (drawn[0], order.draw_of(batch.noise, request, depth), drawn[1], drawn[2])
        limits = limits_of(batch.requests, request, vocab)
        collected = scratch.collected + row * lists.COLLECTED_FIELDS
        cut, mass, winner = _filtered(
            view, pieces, memory, limits, race, exact, winner, mass, collected, PIECE, CHUNK, LIST,
            COLLECTS,
        )  # fmt: skip
    chance = order.weight_of(order.distance_of(winner)) / tl.where(mass > 0.0, mass, 1.0)
    out = first_out + row.to(tl.int64) * out_step
    store_dists(dists, out, top, mass, chance, cut, (winner & order.ID).to(tl.int32), finite, True)


@jit
def facts_of(
    batch, certain_ptr, scanned, row, vocab, num_tiles, purpose, any_drawn, TILES: tl.constexpr
):  # fmt: skip
    """Return facts of a row after its scan: request, depth, 1 / temperature, maximum, mass; whether
    all is finite; the winner's code; whether it is filtered, and by the exact mass; its race."""
    request = tl.load(batch.rows.requests + row)
    depth = tl.load(batch.rows.depths + row)
    mode = tl.load(batch.requests.modes + request)
    inverse = order.inverse_of(batch.requests, request)
    race = order.race_of(batch, certain_ptr, request, depth, purpose, any_drawn)
    one = tl.zeros([1], tl.int32)
    tops, masses, finites, bests, logits = combined(
        scanned, row + one, one == 0, num_tiles, inverse, mode + one == order.GREEDY,
        race[0] & (one == 0), TILES,
    )  # fmt: skip
    top, mass, finite = tl.max(tops, 0), tl.max(masses, 0), tl.max(finites, 0)
    token = tl.max(bests, 0) & order.ID
    winner = order.code_of((top - tl.max(logits, 0)) * inverse, token)
    filtered = order.is_filtered(batch.requests, request, vocab) & (mass > 0.0) & (finite != 0)
    # Verification needs the exact mass of a row with a draft, and not the winner alone.
    has_draft = depth < tl.load(batch.drafts.counts + request)
    exact = (purpose == order.DRAFT) | ((purpose == order.VERIFY) & has_draft)
    exact = exact & (mode >= order.REJECTION)
    return request, depth, inverse, top, mass, finite, winner, filtered, exact, race


@jit
def pieces_of(scanned, row, num_tiles, top, inverse, PIECES: tl.constexpr, ALL: tl.constexpr):
    """Return, of each piece of a row, fp32 [ALL]: the distance of its likeliest token, the weight
    of that token, and the weight of all."""
    piece = tl.arange(0, ALL)
    in_range = piece < num_tiles * PIECES
    first = row.to(tl.int64) * num_tiles
    tops = tl.load(scanned.piece_tops + first * PIECES + piece, mask=in_range, other=LOWEST)
    masses = tl.load(scanned.piece_masses + first * PIECES + piece, mask=in_range, other=0.0)
    tiles = scanned.tiles + (first + piece // PIECES) * scan.TILE_FIELDS + scan.TILE_TOP
    tile_tops = tl.load(tiles, mask=in_range, other=LOWEST)
    masses = masses * order.weight_of((top - tile_tops) * inverse)
    nearest = tl.where(in_range, (top - tops) * inverse, float("inf"))
    return nearest, order.weight_of(nearest), masses


@jit
def limits_of(requests, request, vocab):
    """Return top_k, whether there is one, top_p (infinite: none), and the cut of min_p."""
    top_k = tl.load(requests.top_k + request)
    min_p = tl.load(requests.min_p + request)
    farthest = 0.0 - tl.log(tl.where(min_p > 0.0, min_p, 1.0))  # never minus zero
    cut = tl.where(min_p > 0.0, (order.key_of(farthest) + 1) << 32, LAST)
    return top_k, top_k < vocab, tl.load(requests.top_p + request), cut


@jit
def _filtered(
    view, pieces, memory, limits, race, exact, winner, mass, collected_ptr, PIECE: tl.constexpr,
    CHUNK: tl.constexpr, LIST: tl.constexpr, COLLECTS: tl.constexpr,
):  # fmt: skip
    """Return the cut, the mass before it, and the code of the winner before it. Without `exact` the
    cut may lie anywhere after the given winner, and the mass is not exact."""
    top_k, by_count, top_p, nearest = limits
    by_mass = top_p < float("inf")
    bound = bound_of(nearest, exact, winner)
    cut = winner * 0 + LAST
    list_end, list_length, collected_end = winner * 0, 0, winner * 0
    if COLLECTS:
        first_end = tl.load(collected_ptr + lists.COLLECTED_END)
        list_length = tl.load(collected_ptr + lists.COLLECTED_LENGTH).to(tl.int32)
        list_end, collected_end = tl.where(list_length < LIST, first_end, 0), first_end
    else:
        first_end = guess_end(pieces, limits, mass, PIECE)
    for stage in range(3):  # top-k by count, top-p by mass, and the race of the remaining tokens
        end = tl.where((stage == 0) & by_mass, LAST, tl.minimum(cut, bound))
        share = mass * tl.minimum(top_p, 1.0)
        nucleus = tl.where(by_mass, tl.maximum((share * lists.UNIT).to(tl.int64), 1), lists.ENDLESS)
        limit = tl.where(stage == 0, top_k.to(tl.int64), nucleus)
        needed = tl.where(stage == 0, by_count, by_mass | (exact & ~by_count))
        needed = tl.where(stage == 2, race[0] & (winner >= end), needed)
        if needed:
            first = tl.where(
                (stage == 2) | (limit == lists.ENDLESS), end, tl.minimum(first_end, end)
            )
            low, before, list_end, list_length, mass_before_end, reached, race_winner = lists.read(
                view, pieces[0], memory, race, stage, first, end, limit, list_end, list_length,
                collected_ptr, collected_end, PIECE, CHUNK, LIST, COLLECTS,
            )  # fmt: skip
            collected_end = collected_end * 0  # another list may have replaced the collected one
            if stage == 2:
                winner = race_winner
            else:
                cut, kept = end, mass_before_end
                if reached:
                    last = tl.minimum(list_end, end) - 1
                    cut, kept = lists.search(
                        memory[1], list_length, stage, before, limit, low, last, CHUNK * PIECE
                    )
                mass = kept.to(tl.float32) * (1.0 / lists.UNIT)
                list_end = tl.where((low == 0) & (list_length < LIST), list_end, 0)
    return tl.minimum(cut, bound), mass, winner


@jit
def bound_of(nearest, exact, winner):
    """Return an end that the cut need not pass. `nearest`: the cut of min_p."""
    return tl.where(exact, nearest, tl.minimum(nearest, winner + 1))


@jit
def guess_end(pieces, limits, mass, PIECE: tl.constexpr):
    """Return the first end to try, from the limits and the mass of a row."""
    top_k, by_count, top_p, _ = limits
    target = tl.where(by_count, top_k.to(tl.float32), mass * tl.minimum(top_p, 1.0))
    return guess_cut(pieces, target, by_count, PIECE)


@jit
def guess_cut(pieces, target, by_count, PIECE: tl.constexpr):
    """Return an end before which `target` tokens, or as much mass, are expected."""
    low = tl.program_id(1)  # 0
    high = low + FARTHEST_GUESS
    for _ in range(GUESSES):
        middle = (low + high) // 2
        y = middle.to(tl.float32) * GUESS_STEP
        rest = (REST_SHARE * (PIECE - 1)) * order.weight_of(y)
        more = tl.where(by_count, 1.0, tl.maximum(pieces[1], pieces[2] - rest))
        enough = tl.sum(tl.where(pieces[0] <= y, more, 0.0), axis=0) >= target
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return order.key_of((high + 1).to(tl.float32) * GUESS_STEP) << 32
