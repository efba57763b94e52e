"""The noise of `cbatch/core/request/noise.py` as Triton device functions, bit for bit.

Kernels that call these are compiled with `enable_fp_fusion=False`: the specification rounds after
every operation, and a fused multiply-add would not.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import host as noise

ROUNDS = tl.constexpr(noise.PHILOX_ROUNDS)
THREE_QUARTERS_BITS = tl.constexpr(noise.THREE_QUARTERS_BITS)
SMALL_DRAW = tl.constexpr(noise.SMALL_DRAW)
LN2 = tl.constexpr(noise.constants()[0])
COEFFICIENTS = tl.constexpr(noise.constants()[1])
DEGREE = tl.constexpr(len(noise.LOG1P_COEFFICIENT_BITS) - 1)


@jit
def load_seeds(keys_ptr, requests):
    """The 64-bit seeds of `requests` from their two words, int64 [B, 2]."""
    low = tl.load(keys_ptr + 2 * requests)
    return low | (tl.load(keys_ptr + 2 * requests + 1) << 32)


@jit
def tile_words(seeds, first, positions, choices, purposes, BLOCK: tl.constexpr):
    """Words of the tokens first .. first + BLOCK - 1 (`first` a multiple of 4): uint32 [R, BLOCK]
    for R draws, the others [R]. All four words of a counter are used."""
    groups = first // 4 + tl.arange(0, BLOCK // 4)[None, :]
    a, b, c, d = _four_words(seeds[:, None], groups, positions, choices, purposes)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@jit
def words_of(seeds, ids, positions, choices, purposes):
    """Words of the tokens `ids`, int32 [R, W]: uint32 [R, W]."""
    a, b, c, d = _four_words(seeds[:, None], ids // 4, positions, choices, purposes)
    lane = ids % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@jit
def scalar_words(seeds, positions, choices, purposes):
    """One word a draw (that of token 0): uint32 [R]."""
    zeros = (positions * 0).to(tl.uint32)
    return tl.philox(
        seeds,
        zeros,
        positions.to(tl.uint32),
        choices.to(tl.uint32),
        zeros + purposes.to(tl.uint32),
        ROUNDS,
    )[0]


@jit
def _four_words(seeds, groups, positions, choices, purposes):
    return tl.philox(
        seeds,
        groups.to(tl.uint32),
        positions[:, None].to(tl.uint32),
        choices[:, None].to(tl.uint32),
        purposes[:, None].to(tl.uint32),
        ROUNDS,
    )


@jit
def uniform(words):
    """u in (0, 1], fp32. The one word whose successor wraps stands for 2**32 itself."""
    successor = (words + 1).to(tl.float32)
    return tl.where(words == 0xFFFFFFFF, 4294967296.0, successor) * 2.3283064365386963e-10


@jit
def exponential(words):
    """E = -ln(1 - u) > 0, fp32; see the specification for the form."""
    rest = tl.maximum(0xFFFFFFFF - words, 1).to(tl.float32)
    bits = rest.to(tl.int32, bitcast=True)
    exponent = (bits - THREE_QUARTERS_BITS) >> 23
    fraction = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    small = words < SMALL_DRAW
    r = tl.where(small, -uniform(words), fraction - 1.0)
    e = tl.where(small, 0, 32 - exponent).to(tl.float32)
    poly = r * COEFFICIENTS[DEGREE]
    for i in tl.static_range(1, DEGREE):
        poly = (poly + COEFFICIENTS[DEGREE - i]) * r
    return e * LN2 - (poly + COEFFICIENTS[0]) * r
