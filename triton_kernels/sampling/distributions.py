"""The kernel that finds the distribution of a row after temperature and filters, without a sort.
One program handles a row, after the scan.

The cut of a filter is the least code that has top_k tokens, or the mass of the nucleus, before it
(Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1). The
maximum and mass of each piece, which the scan stored, give an estimate of where the cut lies: the
*end*. Only pieces with tokens before the end are read again, usually few. These tokens are summed
and listed, and the cut is found in the list by bisection. If the list would overflow, or the cut
lies after the end, another end is chosen from the sums so far.

Masses are integers in units of 2**-38 of the likeliest token, so sums do not depend on their order.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.sampling import order, scan
from triton_kernels.sampling.order import LAST, LOWEST

UNIT = tl.constexpr(float(1 << 38))
ONE = tl.constexpr(1 << 50)  # one token in a packed sum: counts lie above the bits of 4095 masses
ENDLESS = tl.constexpr((1 << 63) - 1)  # a limit that no row reaches
# The first end is chosen among distances GUESS_STEP apart, by GUESSES bisections.
GUESS_STEP = tl.constexpr(1.0 / 16)
FARTHEST_GUESS = tl.constexpr(512)
GUESSES = tl.constexpr(10)
# Share of a piece's other tokens that a guess assumes to be as likely as a token at the end.
REST_SHARE = tl.constexpr(0.1)
NEAR = tl.constexpr(0.125)  # tokens within this distance before an end give the density there
MAX_GUESSES = tl.constexpr(8)  # most ends chosen by density; later ends halve the interval

# Fields of a row of `Distributions.floats`.
DIST_MAX = tl.constexpr(0)
DIST_MASS = tl.constexpr(1)
DIST_CHANCE = tl.constexpr(2)
DIST_FIELDS = tl.constexpr(3)

# Fields of a row of `Scratch.collected`, see `collect`.
COLLECTED_END = tl.constexpr(0)
COLLECTED_LENGTH = tl.constexpr(1)
COLLECTED_MASS = tl.constexpr(2)
COLLECTED_NEAR = tl.constexpr(3)
COLLECTED_FIELDS = tl.constexpr(4)


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
        view = (
            batch.logits + row.to(tl.int64) * stride, vocab, num_dense * PIECES,
            overlay.ids + row.to(tl.int64) * list_width,
            overlay.logits + row.to(tl.int64) * logits_step, list_width, top, inverse,
        )  # fmt: skip
        pieces = pieces_of(scanned, row, num_tiles, top, inverse, PIECES, ALL_PIECES)
        memory = (
            scratch.pieces + row.to(tl.int64) * num_tiles * PIECES,
            scratch.codes + row.to(tl.int64) * LIST,
        )
        race = (drawn[0], order.draw_of(batch.noise, request, depth), drawn[1], drawn[2])
        limits = limits_of(batch.requests, request, vocab)
        collected = scratch.collected + row * COLLECTED_FIELDS
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
    """Return, of a row after its scan: request, depth, 1 / temperature, maximum, mass, whether all
    is finite, the code of the winner, whether a filter applies, whether the mass must be exact, and
    the results of `order.race_of`."""
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
    bound = tl.where(exact, nearest, tl.minimum(nearest, winner + 1))
    cut = winner * 0 + LAST
    list_end, list_length, collected_end = winner * 0, 0, winner * 0
    if COLLECTS:
        first_end = tl.load(collected_ptr + COLLECTED_END)
        list_length = tl.load(collected_ptr + COLLECTED_LENGTH).to(tl.int32)
        list_end, collected_end = tl.where(list_length < LIST, first_end, 0), first_end
    else:
        target = tl.where(by_count, top_k.to(tl.float32), mass * tl.minimum(top_p, 1.0))
        first_end = guess_cut(pieces, target, by_count, PIECE)
    for stage in range(3):  # top-k by count, top-p by mass, and the race of the remaining tokens
        end = tl.where((stage == 0) & by_mass, LAST, tl.minimum(cut, bound))
        share = mass * tl.minimum(top_p, 1.0)
        nucleus = tl.where(by_mass, tl.maximum((share * UNIT).to(tl.int64), 1), ENDLESS)
        limit = tl.where(stage == 0, top_k.to(tl.int64), nucleus)
        needed = tl.where(stage == 0, by_count, by_mass | (exact & ~by_count))
        needed = tl.where(stage == 2, race[0] & (winner >= end), needed)
        if needed:
            first = tl.where((stage == 2) | (limit == ENDLESS), end, tl.minimum(first_end, end))
            low, before, list_end, list_length, mass_before_end, reached, race_winner = _read(
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
                    cut, kept = search(
                        memory[1], list_length, stage, before, limit, low, last, CHUNK * PIECE
                    )
                mass = kept.to(tl.float32) * (1.0 / UNIT)
                list_end = tl.where((low == 0) & (list_length < LIST), list_end, 0)
    return tl.minimum(cut, bound), mass, winner


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


@jit
def _read(
    view, nearest, memory, race, stage, pivot, end, limit, list_end, list_length, collected_ptr,
    collected_end, PIECE: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr,
    COLLECTS: tl.constexpr,
):  # fmt: skip
    """List the tokens among which the limit is reached, unless they are listed already. `pivot` is
    the first end to try.

    Return where the list begins, with the count and mass before it; where it ends, and its length;
    the mass before its end; whether the limit is reached; and in the race the winner."""
    low, high = end * 0, end
    low_count, low_mass, mass, winner = 0, end * 0, end * 0, end * 0
    reached = list_end >= end
    searching, rounds = (stage == 2) | ~reached, 0
    if COLLECTS:
        searching = ~reached
        if (stage == 2) & reached:
            winner = _listed_winner(memory[1], list_length, end, race, CHUNK * PIECE)
        collected_end = tl.where(stage == 2, 0, collected_end)
    while searching:
        if COLLECTS:
            list_length = tl.load(collected_ptr + COLLECTED_LENGTH).to(tl.int32)
            mass = tl.load(collected_ptr + COLLECTED_MASS)
            num_near = tl.load(collected_ptr + COLLECTED_NEAR).to(tl.int32)
            if pivot != collected_end:
                list_length, mass, num_near, winner = _measure(
                    view, nearest, memory, low, pivot, race, stage == 2, PIECE, CHUNK, LIST
                )
            collected_end = collected_end * 0
        else:
            list_length, mass, num_near, winner = _measure(
                view, nearest, memory, low, pivot, race, stage == 2, PIECE, CHUNK, LIST
            )
        before_pivot = tl.where(stage == 0, low_count + list_length, low_mass + mass)
        reached = before_pivot >= limit
        searching = (stage < 2) & tl.where(reached, list_length >= LIST, pivot < end)
        list_end = pivot
        if searching:
            low = tl.where(reached, low, pivot)
            high = tl.where(reached, pivot, high)
            low_count += tl.where(reached, 0, list_length)
            low_mass += tl.where(reached, 0, mass)
            pivot = _next(
                pivot, low, high, end, reached, limit - before_pivot, stage == 0, num_near, rounds
            )
            rounds += 1
    before = ((low_mass * 0 + low_count), low_mass)
    return low, before, list_end, list_length, low_mass + mass, reached, winner


@jit
def _next(pivot, low, high, end, reached, gap, by_count, num_near, rounds):
    """Return another end in (low, high], by the number of tokens near `pivot`, the last one."""
    y = order.distance_of(pivot)
    tokens = gap.to(tl.float32)
    by_mass = tokens * (1.0 / UNIT) * tl.exp2(y * order.LOG2_E)
    missing = tl.where(by_count, tokens, by_mass)
    step = 1.25 * NEAR * missing / tl.maximum(num_near, 2).to(tl.float32)
    step += tl.where(reached, -1.0 / 64, 1.0 / 32)
    y_next = tl.maximum(y + tl.minimum(tl.maximum(step, -4.0), 4.0), 0.0)
    guess = order.key_of(y_next) << 32
    halved = low + tl.maximum((high - low) // 2, 1)
    further = tl.where(y < 64.0, tl.minimum(order.key_of(2.0 * y + 1.0) << 32, end), end)
    fallback = tl.where(reached | (high < end), halved, further)
    return tl.where((guess > low) & (guess < high) & (rounds < MAX_GUESSES), guess, fallback)


@jit
def choose(nearest, end, pieces_ptr):
    """List the pieces with tokens before `end`, and return their number."""
    chosen = (order.key_of(nearest) << 32 < end) & (nearest < float("inf"))
    chosen = chosen.to(tl.int32)
    tl.debug_barrier()  # what was listed before has been read
    piece = tl.arange(0, chosen.shape[0])
    tl.store(pieces_ptr + tl.cumsum(chosen, 0) - 1, piece, mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(chosen, axis=0)


@jit
def _measure(
    view, nearest, memory, low, end, race, races, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """List the codes of the tokens in [low, end) as far as there is room. Return their number,
    their mass, how many of them are near the end, and with `races` the winner of the race."""
    num_pieces = choose(nearest, end, memory[0])
    _, draw, stream, excluded = race
    seed, position, choice = draw
    sums = tl.zeros([CHUNK, PIECE], tl.int64)
    count, best, winner = 0, end * 0 + ENDLESS, end * 0
    for chunk in range(tl.cdiv(num_pieces, CHUNK)):
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        piece = tl.load(memory[0] + index, mask=index < num_pieces, other=-1)[:, None]
        codes, inside, amounts, ids, y = measured(view, piece, low, end, PIECE)
        sums += amounts
        ones = inside.to(tl.int32)
        piece_counts = tl.sum(ones, axis=1)
        place = count + tl.cumsum(piece_counts, 0) - piece_counts
        place = place[:, None] + tl.cumsum(ones, 1) - 1
        tl.store(memory[1] + place, codes, mask=inside & (place < LIST))
        count += tl.sum(piece_counts, axis=0)
        if races:
            words = noise_device.words_of(seed, ids, position, choice, stream)
            keys = order.race_key(noise_device.exponential(words), y, ids)
            keys = tl.where(inside & (ids != excluded), keys, order.NEVER)
            least = tl.min(tl.min(keys, axis=1), axis=0)
            chunk_winner = tl.max(tl.max(tl.where(keys == least, codes, 0), axis=1), axis=0)
            winner = tl.where(least < best, chunk_winner, winner)
            best = tl.minimum(best, least)
    tl.debug_barrier()  # the list is read by other threads
    mass = tl.sum(tl.sum(sums & (ONE - 1), axis=1), axis=0)
    return count, mass, tl.sum(tl.sum((sums >> 50).to(tl.int32), axis=1), axis=0), winner


@jit
def measured(view, piece, low, end, PIECE: tl.constexpr):
    """Return, of the tokens of pieces [CHUNK, 1]: codes; whether they lie in [low, end); of those
    that do, the mass, and above its bits 1 if they are near the end; ids; and distances."""
    ids, x = _tokens(view, piece, PIECE)
    y = (view[6] - x) * view[7]
    codes = order.code_of(y, ids)
    inside = (codes >= low) & (codes < end) & (piece >= 0)
    edge = order.key_of(tl.maximum(order.distance_of(end) - NEAR, 0.0)) << 32
    amounts = (order.weight_of(y) * UNIT).to(tl.int64) + tl.where(codes >= edge, ONE, 0)
    return codes, inside, tl.where(inside, amounts, 0), ids, y


@jit
def _listed_winner(codes_ptr, length, end, race, LANES: tl.constexpr):
    """Return the code of the winner among the listed tokens before `end`."""
    _, draw, stream, excluded = race
    seed, position, choice = draw
    best, winner = end * 0 + ENDLESS, end * 0
    for first in range(0, length, LANES):
        lane = first + tl.arange(0, LANES)
        codes = tl.load(codes_ptr + lane, mask=lane < length, other=ENDLESS)
        ids, y = (codes & order.ID).to(tl.int32), order.distance_of(codes)
        words = noise_device.words_of(seed, ids, position, choice, stream)
        keys = order.race_key(noise_device.exponential(words), y, ids)
        inside = codes < end
        keys = tl.where(inside & (ids != excluded), keys, order.NEVER)
        least = tl.min(keys, axis=0)
        chunk_winner = tl.max(tl.where(inside & (keys == least), codes, 0), axis=0)
        winner = tl.where(least < best, chunk_winner, winner)
        best = tl.minimum(best, least)
    return winner


@jit
def _tokens(view, piece, PIECE: tl.constexpr):
    """Return ids and logits of pieces [CHUNK, 1] of a row, dense or of its overlay."""
    logits_ptr, vocab, num_dense, listed_ptr, shaped_ptr, list_width, _, _ = view
    ids = piece * PIECE + tl.arange(0, PIECE)[None, :]
    dense = (piece >= 0) & (piece < num_dense) & (ids < vocab)
    lowest = order.lowest_of(logits_ptr.dtype.element_ty)
    x, _ = order.cleaned(tl.load(logits_ptr + ids, mask=dense, other=lowest))
    entry = ids - num_dense * PIECE
    listed = (piece >= num_dense) & (entry < list_width)
    ids = tl.where(piece >= num_dense, tl.load(listed_ptr + entry, mask=listed, other=0), ids)
    x = tl.where(listed, tl.load(shaped_ptr + entry, mask=listed, other=LOWEST), x)
    return ids, x


@jit
def search(codes_ptr, length, stage, before, limit, low, last, LANES: tl.constexpr):
    """Return the least cut in a list that has the limit before it, else the one after `last`, and
    the mass before the cut. `before`: count and mass before the list."""
    high, probe, mass = last, last, last * 0
    searching, failed = length > 0, length == 0
    while searching:
        sums = tl.zeros([LANES], tl.int64)
        last_inside, first_outside = sums, sums + ENDLESS
        for first in range(0, length, LANES):
            lane = first + tl.arange(0, LANES)
            codes = tl.load(codes_ptr + lane, mask=lane < length, other=ENDLESS)
            inside = codes <= probe
            weights = order.weight_of(order.distance_of(tl.where(inside, codes, 0)))
            sums += tl.where(inside, (weights * UNIT).to(tl.int64) + ONE, 0)
            last_inside = tl.maximum(last_inside, tl.where(inside, codes, 0))
            first_outside = tl.minimum(first_outside, tl.where(inside, ENDLESS, codes))
        total = tl.sum(sums, axis=0)
        count, mass_before = before[0] + (total >> 50), before[1] + (total & (ONE - 1))
        enough = tl.where(stage == 0, count, mass_before) >= limit
        failed = ~enough & (probe == last)
        mass = tl.where(enough | failed, mass_before, mass)
        high = tl.where(enough, tl.max(last_inside, axis=0), high)
        low = tl.where(enough, low, tl.min(first_outside, axis=0))
        probe = low + (high - low) // 2
        searching = ~failed & (low < high)
    return tl.where(failed, last, high) + 1, mass
