"""The noise of `cbatch/core/request/noise.py` as Triton device functions, bit for bit.

Kernels that call these functions are compiled with `enable_fp_fusion=False`: the specification
rounds after every operation, a fused multiply-add does not. The caller broadcasts the arguments of
a draw against its tokens.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import streams as noise

ROUNDS = tl.constexpr(noise.PHILOX_ROUNDS)
THREE_QUARTERS_BITS = tl.constexpr(noise.THREE_QUARTERS_BITS)
SMALL_DRAW = tl.constexpr(noise.SMALL_DRAW)
LN2 = tl.constexpr(noise.LN2)
COEFFICIENTS = tl.constexpr(tuple(noise.COEFFICIENTS))
DEGREE = tl.constexpr(len(noise.LOG1P_COEFFICIENT_BITS) - 1)


@jit
def load_seeds(keys_ptr, requests):
    """Return the 64-bit seeds of `requests` from their two words, int64 [B, 2]."""
    low = tl.load(keys_ptr + 2 * requests)
    return low | (tl.load(keys_ptr + 2 * requests + 1) << 32)


@jit
def run_words(seed, groups, position, choice, purpose, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the words of consecutive tokens, uint32 [ROWS, WIDTH], for `groups` int32 [ROWS, WIDTH
    / 4] of four tokens each. All four words of a counter are used."""
    a, b, c, d = _four_words(seed, groups, position, choice, purpose)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, WIDTH])


@jit
def words_of(seed, ids, position, choice, purpose):
    """Return the words of the tokens `ids`, int32 of any shape."""
    a, b, c, d = _four_words(seed, ids // 4, position, choice, purpose)
    lane = ids % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@jit
def scalar_words(seeds, positions, choices, purposes):
    """Return one word for each draw (that of token 0): uint32 [R]."""
    return _four_words(seeds, positions * 0, positions, choices, purposes)[0]


@jit
def _four_words(seed, groups, position, choice, purpose):
    groups = groups.to(tl.uint32)
    zeros = groups * 0
    return tl.philox(
        seed,
        groups,
        zeros + position.to(tl.uint32),
        zeros + choice.to(tl.uint32),
        zeros + purpose.to(tl.uint32),
        ROUNDS,
    )


@jit
def uniform(words):
    """Return u in (0, 1], fp32. The word 2**32 - 1, whose successor wraps, gives u = 1."""
    successor = (words + 1).to(tl.float32)
    return tl.where(words == 0xFFFFFFFF, 4294967296.0, successor) * 2.3283064365386963e-10


@jit
def exponential(words):
    """Return E = -ln(1 - u) > 0, fp32, in the form of the specification. The exponent of a small
    draw is 0 without a special case."""
    rest = tl.maximum(0xFFFFFFFF - words, 1).to(tl.float32)
    bits = rest.to(tl.int32, bitcast=True)
    exponent = (bits - THREE_QUARTERS_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    small = (words + 1).to(tl.float32) * -2.3283064365386963e-10
    r = tl.where(words < SMALL_DRAW, small, fraction - 1.0)
    e = (32 - exponent).to(tl.float32)
    poly = r * COEFFICIENTS[DEGREE]
    for i in tl.static_range(1, DEGREE):
        poly = (poly + COEFFICIENTS[DEGREE - i]) * r
    return e * LN2 - (poly + COEFFICIENTS[0]) * r
