"""The noise specification: known answers, golden vectors, precision of the logarithm, the law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cbatch.core.request import noise
from cbatch.core.request.noise import Purpose
from tests.chi_square import chi_square_z

# Known-answer vectors of Philox4x32-10 from Random123: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
EDGES = np.array(
    [0, 1, 2, 0x7FFF, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1],
    dtype=np.uint32,
)
GOLDEN_WORDS = [0x49DA8D90, 0x11388473, 0x309DF903, 0x8191C135, 0xF46A6B6D, 0x10FCB564]
GOLDEN_UNIFORM_BITS = [
    0x2F800000,
    0x30000000,
    0x30400000,
    0x37000000,
    0x3E800000,
    0x3E800000,
    0x3E800000,
    0x3F000000,
    0x3F800000,
    0x3F800000,
    0x3F800000,
]
GOLDEN_EXPONENTIAL_BITS = [
    0x2F800000,
    0x30000000,
    0x30400000,
    0x37000020,
    0x3E934B10,
    0x3E934B10,
    0x3E934B10,
    0x3F317218,
    0x418AA123,
    0x41B17218,
    0x41B17218,
]


def draws(seed: int, count: int, purpose: Purpose = Purpose.BONUS) -> np.ndarray:
    keys = np.tile(np.array(noise.split_seed(seed), dtype=np.uint32), (count, 1))
    return noise.scalar_words(keys, np.arange(count), 0, purpose)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(w) for w in noise.philox4x32(counter, key)) == expected


def test_counter_layout_against_plain_philox():
    seed, choice, position, vocab = 0xDEADBEEF_12345678, 3, 70_001, 11
    words = noise.token_words([noise.split_seed(seed)], position, choice, Purpose.RESIDUAL, vocab)
    for token in range(vocab):
        block = noise.philox4x32((token // 4, position, choice, 2), (0x12345678, 0xDEADBEEF))
        assert words[0, token] == block[token % 4]
    scalar = noise.scalar_words([noise.split_seed(seed)], position, choice, Purpose.RESIDUAL)
    assert scalar[0] == words[0, 0]


def test_golden_vectors():
    """These bits are frozen: a change here changes every sampled token of every user."""
    words = noise.token_words([noise.split_seed(2**64 - 59)], 1234, 1, Purpose.DRAFT, 6)
    assert words[0].tolist() == GOLDEN_WORDS
    assert noise.uniform(EDGES).view(np.uint32).tolist() == GOLDEN_UNIFORM_BITS
    assert noise.exponential(EDGES).view(np.uint32).tolist() == GOLDEN_EXPONENTIAL_BITS


def test_uniform_is_in_half_open_interval():
    u = noise.uniform(EDGES)
    assert u.min() == np.float32(2.0**-32) and u.max() == 1.0 and np.all(u > 0)


def test_exponential_precision_and_tail():
    rng = np.random.default_rng(5)
    x = np.concatenate([EDGES, np.arange(4096), rng.integers(0, 2**32, 200_000)])
    x = x.astype(np.uint32)
    got = noise.exponential(x).astype(np.float64)
    u = noise.uniform(x).astype(np.float64)
    w = np.maximum(~x, np.uint32(1)).astype(np.float32).astype(np.float64)
    small = x < 2**30
    want = np.where(small, -np.log1p(-np.where(small, u, 0)), -np.log(w * 2.0**-32))
    ulp = np.spacing(want.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(got - want) / ulp) < 2.0
    assert got.min() == 2.0**-32 and math.isclose(got.max(), 32 * math.log(2), rel_tol=1e-6)


def test_exponential_is_nondecreasing_in_the_draw():
    x = np.sort(np.random.default_rng(6).integers(0, 2**32, 400_000)).astype(np.uint32)
    e = noise.exponential(x)
    # Roundings of neighbours with one value may differ by one or two ulps, never by more.
    assert np.max((e[:-1] - e[1:]) / np.spacing(e[1:])) <= 2.0


def test_race_draws_from_p():
    p = np.array([0.4, 0.25, 0.2, 0.1, 0.05], dtype=np.float32)
    keys = np.tile(np.array(noise.split_seed(11), dtype=np.uint32), (60_000, 1))
    words = noise.token_words(keys, np.arange(60_000), 0, Purpose.BONUS, 5)
    winners = noise.race(p[None], noise.exponential(words))
    assert abs(chi_square_z(np.bincount(winners, minlength=5), p)) < 5
    broken = noise.race(p[None], noise.uniform(words))  # a uniform is not an exponential
    assert chi_square_z(np.bincount(broken, minlength=5), p) > 10


def test_race_ties_go_to_the_lowest_id_and_zero_never_wins():
    e = np.ones((1, 4), dtype=np.float32)
    assert noise.race(np.array([[0.0, 0.5, 0.5, 0.0]], dtype=np.float32), e)[0] == 1
