"""Lists of the tokens of a row before an end, among which a filter finds its cut.

Only pieces with tokens before the end are read. If the list would overflow, or the cut lies after
the end, another end is chosen from the sums so far.

Masses are integers in units of 2**-38 of the likeliest token, so sums do not depend on their order.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.sampling import order
from triton_kernels.sampling.order import LOWEST

UNIT = tl.constexpr(float(1 << 38))
ONE = tl.constexpr(1 << 50)  # one token in a packed sum: counts lie above the bits of 4095 masses
ENDLESS = tl.constexpr((1 << 63) - 1)  # a limit that no row reaches
NEAR = tl.constexpr(0.125)  # tokens within this distance before an end give the density there
MAX_GUESSES = tl.constexpr(8)  # most ends chosen by density; later ends halve the interval

# Fields of a row of `Scratch.collected`, see `collect`.
COLLECTED_END = tl.constexpr(0)
COLLECTED_LENGTH = tl.constexpr(1)
COLLECTED_MASS = tl.constexpr(2)
COLLECTED_NEAR = tl.constexpr(3)
COLLECTED_FIELDS = tl.constexpr(4)


@jit
def view_of(
    batch, overlay, row, vocab, stride, list_width, logits_step, num_dense, top, inverse
):  # fmt: skip
    """Return where the tokens of a row are: `num_dense` dense ones, then those of its overlay."""
    return (
        batch.logits + row.to(tl.int64) * stride, vocab, num_dense,
        overlay.ids + row.to(tl.int64) * list_width,
        overlay.logits + row.to(tl.int64) * logits_step, list_width, top, inverse,
    )  # fmt: skip


@jit
def read(
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
            if pivot == collected_end:
                list_length = tl.load(collected_ptr + COLLECTED_LENGTH).to(tl.int32)
                mass = tl.load(collected_ptr + COLLECTED_MASS)
                num_near = tl.load(collected_ptr + COLLECTED_NEAR).to(tl.int32)
            else:
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
    mass, num_near = totals(sums)
    return count, mass, num_near, winner


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
def totals(sums):
    """Return the mass in sums of amounts of `measured`, and the number of tokens near the end."""
    mass = tl.sum(tl.sum(sums & (ONE - 1), axis=1), axis=0)
    return mass, tl.sum(tl.sum((sums >> 50).to(tl.int32), axis=1), axis=0)


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
