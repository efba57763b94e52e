"""Sampling noise: random words that are a pure function of (seed, choice, position, purpose).

This is the specification; `noise.py` and `race.h` in `cbatch/runtime` reproduce it bit for bit.

Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3").

    key = (seed & 0xffffffff, seed >> 32)
    counter = (token_id // 4, absolute position of the sampled token, choice index, purpose)

The generator returns four words; the word of a token has index token_id % 4. A scalar draw (the
accept test) uses the word of token 0. The noise does not depend on batch row, slot or tile.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Purpose(enum.IntEnum):
    """Streams of noise. Accept test and residual need separate streams, or the output is biased."""

    DRAFT = 0  # samples the draft token from q
    ACCEPT = 1  # u of the accept test (scalar)
    RESIDUAL = 2  # samples the replacement of a rejected draft
    BONUS = 3  # samples the token after accepted drafts, and every token without drafts
    COUPLED = 4  # the stream that draft and target share in coupled mode


PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MASK32 = 0xFFFFFFFF

# ln(1 + r) = r * P(r) on [-0.25, 0.5): minimax in relative error (4.2e-9 before rounding to fp32),
# coefficients as fp32 bit patterns, constant term first.
LOG1P_COEFFICIENT_BITS = (
    0x3F800000,
    0xBF000000,
    0x3EAAAAE3,
    0xBE800019,
    0x3E4CB0A4,
    0xBE2A73FB,
    0x3E146A90,
    0xBE070E71,
    0x3DD5E1C4,
    0xBD36AE97,
)
LN2_BITS = 0x3F317218
THREE_QUARTERS_BITS = 0x3F400000
SMALL_DRAW = 1 << 30  # for words below this, ln(1 - u) is computed as ln(1 + r) with r = -u

U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]

_COEFFICIENTS = np.array(LOG1P_COEFFICIENT_BITS, dtype=np.uint32).view(np.float32)
_LN2 = np.array(LN2_BITS, dtype=np.uint32).view(np.float32)
_U64_32 = np.uint64(32)


def philox4x32(counter: ArrayLike, key: ArrayLike) -> U32:
    """Return the words of Philox4x32-10, uint32 [..., 4]: `counter` [..., 4], `key` [..., 2]."""
    c = np.moveaxis(np.asarray(counter, dtype=np.uint32), -1, 0)
    k = np.moveaxis(np.asarray(key, dtype=np.uint32), -1, 0)
    even, odd = _rounds(c[0::2].astype(np.uint64), c[1::2], k)
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=-1)


def _rounds(even: NDArray[np.uint64], odd: U32, key: U32) -> tuple[U32, U32]:
    """Run ten rounds on the lanes (c0, c2) and (c1, c3) of the counter, stacked on the first axis.
    A round multiplies the even lanes, and mixes each product with the opposite odd lane."""
    lanes_first = (2, *(1,) * (even.ndim - 1))
    multiplier = np.array(PHILOX_M, dtype=np.uint64).reshape(lanes_first)
    weyl = np.array(PHILOX_W, dtype=np.uint32).reshape((2, *(1,) * (key.ndim - 1)))
    narrow = even.astype(np.uint32)
    for _ in range(PHILOX_ROUNDS):
        product = even * multiplier
        high = (product >> _U64_32).astype(np.uint32)
        narrow = high[::-1] ^ odd ^ key
        odd = product.astype(np.uint32)[::-1]
        even = narrow.astype(np.uint64)
        key = key + weyl
    return narrow, odd


def split_seed(seed: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of a 64-bit seed."""
    return seed & MASK32, (seed >> 32) & MASK32


def token_words(
    keys: ArrayLike, positions: ArrayLike, choices: ArrayLike, purpose: ArrayLike, vocab_size: int
) -> U32:
    """Return the word of every token id for N draws, uint32 [N, vocab_size].

    `keys` uint32 [N, 2] (see `split_seed`); `positions`, `choices`, `purpose` [N] or scalars.
    """
    key = np.asarray(keys, dtype=np.uint32).reshape(-1, 2).T[:, :, None]
    draws, groups = key.shape[1], -(-vocab_size // 4)
    position, choice, stream = (
        np.broadcast_to(np.asarray(v, dtype=np.uint32), (draws,))[:, None]
        for v in (positions, choices, purpose)
    )
    even = np.empty((2, draws, groups), dtype=np.uint64)
    even[0], even[1] = np.arange(groups, dtype=np.uint64), choice
    odd = np.empty((2, draws, groups), dtype=np.uint32)
    odd[0], odd[1] = position, stream
    even_out, odd_out = _rounds(even, odd, key)
    words = np.stack((even_out[0], odd_out[0], even_out[1], odd_out[1]), axis=-1)
    return words.reshape(draws, 4 * groups)[:, :vocab_size]


def scalar_words(
    keys: ArrayLike, positions: ArrayLike, choices: ArrayLike, purpose: ArrayLike
) -> U32:
    """Return the word of token 0 for N draws, uint32 [N]."""
    return token_words(keys, positions, choices, purpose, vocab_size=1)[:, 0]


def uniform(words: ArrayLike) -> F32:
    """Return u in (0, 1]: fp32(x + 1), rounded to nearest even, times 2**-32."""
    wide = np.asarray(words, dtype=np.uint32).astype(np.uint64) + np.uint64(1)
    return wide.astype(np.float32) * np.float32(2.0**-32)


def exponential(words: ArrayLike) -> F32:
    """Return exponential draws E = -ln(1 - u) > 0.

    The smallest E wins `race`, so small E have full relative precision. E = e*ln2 - r*P(r), where

        x < 2**30: r = -uniform(x), e = 0
        else: w = fp32(max(~x, 1)) = 2**32 * (1 - u); w * 2**-32 = f * 2**-e, f in [0.75, 1.5);
              r = f - 1 (exact)

    Each operation rounds to fp32 in this order: Horner from the highest term, no fused
    multiply-add.
    """
    x = np.asarray(words, dtype=np.uint32)
    bits = np.maximum(~x, np.uint32(1)).astype(np.float32).view(np.int32)
    exponent = (bits - np.int32(THREE_QUARTERS_BITS)) >> np.int32(23)
    fraction = (bits - (exponent << np.int32(23))).view(np.float32)
    small = x < np.uint32(SMALL_DRAW)
    r = np.where(small, -uniform(x), fraction - np.float32(1))
    e = np.where(small, np.int32(0), np.int32(32) - exponent).astype(np.float32)
    poly = np.full(r.shape, _COEFFICIENTS[-1], dtype=np.float32)
    for coefficient in _COEFFICIENTS[-2::-1]:
        poly = poly * r + coefficient
    return np.asarray(e * _LN2 - r * poly, dtype=np.float32)


def race(probabilities: F32, exponentials: F32) -> NDArray[np.int64]:
    """Return the ids that the exponential race (Gumbel-max) samples, int64: argmax of p_i / E_i
    over the last axis, ties to the lowest id."""
    return np.asarray(np.argmax(probabilities / exponentials, axis=-1), dtype=np.int64)
