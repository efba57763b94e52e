"""Device functions: the shaped logits of a tile, their order, and who wins a race.

Tiles are [ROWS, BLOCK]. The first `num_dense` tiles of a row are its vocabulary in order; the
*sparse* ones behind them are the listed tokens of its request, which the dense ones leave out. A
logit is shaped in registers, wherever it is read: nothing is written back.

The order of tokens is (y, id) with y = (max - logit) / temperature >= 0, whose bits ascend as
integers do: a *key*. What filters keep is a prefix of that order, and is told by its end, a *cut*:
(key, id) of the first token that is out.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.sampling import inputs as rows

IN_PROMPT = tl.constexpr(rows.IN_PROMPT)
IS_STOP = tl.constexpr(rows.IS_STOP)
FORBIDDEN = tl.constexpr(0x7F800000)  # the key of minus infinity
NO_ID = tl.constexpr(0x7FFFFFFF)


@jit
def num_sparse(shaping, requests, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    """Sparse tiles of the longest list."""
    count = 0
    if SHAPED:
        count = tl.cdiv(tl.max(tl.load(shaping[0].num_listed + requests), axis=0), BLOCK)
    return count


@jit
def shaped_tile(view, shaping, tile, num_dense, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    """Token ids int32, shaped logits fp32, minus infinity where forbidden, and whether the logit in
    memory is finite (true beyond the vocabulary); [ROWS, BLOCK] each. `view`: logits, vocabulary
    size, where rows begin, their requests and depths, draft tokens, where those of a row begin.
    `shaping`: a `LogitsShaping` (see `inputs`), and the width of its lists."""
    if SHAPED:
        if tile < num_dense:
            ids, x, sound = _dense_tile(view, tile, BLOCK)
            x = _shape_dense(view, shaping, ids, x)
        else:
            ids, x, sound = _sparse_tile(view, shaping, tile - num_dense, BLOCK)
    else:
        ids, x, sound = _dense_tile(view, tile, BLOCK)
    return ids, x, sound


@jit
def _dense_tile(view, tile, BLOCK: tl.constexpr):
    logits_ptr, vocab, at = view[0], view[1], view[2]
    ids = tile * BLOCK + tl.arange(0, BLOCK)[None, :] + (at * 0).to(tl.int32)[:, None]
    x = tl.load(logits_ptr + at[:, None] + ids, mask=ids < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    sound = (ids >= vocab) | (tl.abs(x) < float("inf"))
    return ids, _allowed(x, logits_ptr), sound


@jit
def _allowed(x, logits_ptr):
    """Minus infinity where a token is forbidden in memory. A row that is not finite is reported as
    such; meanwhile nothing of it may spread."""
    inside = (x > lowest_of(logits_ptr.dtype.element_ty)) & (x < float("inf"))
    return tl.where(inside, x, float("-inf"))


@jit
def lowest_of(kind: tl.constexpr):
    """The least finite number of a type of logits."""
    lowest = -3.4028234663852886e38
    if kind == tl.bfloat16:
        lowest = -3.3895313892515355e38
    elif kind == tl.float16:
        lowest = -65504.0
    return lowest


@jit
def _shape_dense(view, shaping, ids, x):
    vocab, requests = view[1], view[3]
    words = tl.cdiv(vocab, 32)
    word_ptr = shaping[0].plain + requests[:, None].to(tl.int64) * words + ids // 32
    word = tl.load(word_ptr, mask=ids < vocab, other=0)
    x = tl.where((word >> (ids % 32)) & 1 != 0, x, float("-inf"))
    drafted = _times_drafted(view, shaping, ids)
    if tl.max(tl.max(drafted, axis=1), axis=0) > 0:
        x = _penalised(shaping, requests, x, drafted, drafted > 0)
    return x


@jit
def _sparse_tile(view, shaping, tile, BLOCK: tl.constexpr):
    logits_ptr, at, requests, depths = view[0], view[2], view[3], view[4]
    width = shaping[1]
    entry = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = entry < tl.load(shaping[0].num_listed + requests)[:, None]
    entry = requests[:, None].to(tl.int64) * width + entry
    ids = tl.load(shaping[0].listed + entry, mask=inside, other=NO_ID)
    x = tl.load(logits_ptr + at[:, None] + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = _allowed(x, logits_ptr) + tl.load(shaping[0].bias + entry, mask=inside, other=0.0)
    marks = tl.load(shaping[0].marks + entry, mask=inside, other=0)
    early = tl.load(shaping[0].min_tokens + requests) > depths
    x = tl.where((marks & IS_STOP != 0) & early[:, None], float("-inf"), x)
    count = tl.load(shaping[0].counts + entry, mask=inside, other=0) + _times_drafted(
        view, shaping, ids
    )
    seen = (count > 0) | (marks & IN_PROMPT != 0)
    return ids, _penalised(shaping, requests, x, count, seen), ids >= 0


@jit
def _times_drafted(view, shaping, ids):
    """How often each of `ids` is among the drafts before its row: int32 [ROWS, BLOCK]. Looked at
    only where a request has penalties."""
    requests, depths, drafts_ptr, starts = view[3], view[4], view[5], view[6]
    repetition, presence, frequency = _penalties(shaping, requests)
    depths = tl.where((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0), depths, 0)
    times = ids * 0
    for j in range(tl.max(depths, axis=0)):
        there = j < depths
        draft = tl.load(drafts_ptr + starts + j, mask=there, other=0)
        times += ((ids == draft[:, None]) & there[:, None]).to(tl.int32)
    return times


@jit
def _penalties(shaping, requests):
    at = shaping[0].penalties + 3 * requests
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@jit
def _penalised(shaping, requests, x, count, seen):
    """Repetition (Keskar et al. 2019, section 4.1; logits below 0 are multiplied) of what was seen,
    then presence and frequency of what is in the output `count` times."""
    repetition, presence, frequency = _penalties(shaping, requests)
    repetition, presence, frequency = repetition[:, None], presence[:, None], frequency[:, None]
    scaled = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    cost = frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    return tl.where(seen, scaled, x) - cost


@jit
def inverse(temperatures):
    """1 / temperature, finite."""
    return tl.minimum(1.0 / temperatures, 3.4028234663852886e38)


@jit
def distance(maxima, x, inverse_temperatures):
    """y fp32 [ROWS, BLOCK] of shaped logits; infinite where forbidden, also if everything is."""
    maxima = tl.where(maxima > float("-inf"), maxima, 0.0)
    return (maxima[:, None] - x) * inverse_temperatures[:, None]


@jit
def key_of(y):
    return y.to(tl.int32, bitcast=True)


@jit
def before(keys, ids, cut_keys, cut_ids):
    """Whether tokens come before a cut; cuts [ROWS]."""
    cut_keys, cut_ids = cut_keys[:, None], cut_ids[:, None]
    return (keys < cut_keys) | ((keys == cut_keys) & (ids < cut_ids))


@jit
def exponentials(source, ids, tile, num_dense, BLOCK: tl.constexpr, SHAPED: tl.constexpr):
    """The noise of the tokens of a tile, fp32 [ROWS, BLOCK]. `source`: seeds, positions, choices
    and purposes, [ROWS] each."""
    if SHAPED:
        if tile < num_dense:
            e = _dense_exponentials(source, tile, BLOCK)
        else:
            e = exponentials_of(source, ids)
    else:
        e = _dense_exponentials(source, tile, BLOCK)
    return e


@jit
def _dense_exponentials(source, tile, BLOCK: tl.constexpr):
    seeds, positions, choices, purposes = source
    words = noise_device.tile_words(seeds, tile * BLOCK, positions, choices, purposes, BLOCK)
    return noise_device.exponential(words)


@jit
def exponentials_of(source, ids):
    """The noise of any tokens, fp32 [ROWS, BLOCK]."""
    seeds, positions, choices, purposes = source
    return noise_device.exponential(noise_device.words_of(seeds, ids, positions, choices, purposes))


@jit
def winners(scores, ids):
    """Best score and lowest id that has it, [ROWS] each."""
    best = tl.max(scores, axis=1)
    return best, tl.min(tl.where(scores == best[:, None], ids, NO_ID), axis=1)
