"""The torch noise equals the specification bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from cbatch.core.request import noise as spec
from cbatch.core.request.noise import Purpose
from cbatch.runtime.sampling import noise
from triton_kernels.noise import streams


def test_constants_are_those_of_the_specification():
    names = [
        "LOG1P_COEFFICIENT_BITS",
        "THREE_QUARTERS_BITS",
        "SMALL_DRAW",
        "PHILOX_ROUNDS",
    ]
    assert [getattr(streams, n) for n in names] == [getattr(spec, n) for n in names]
    assert (streams.LN2, tuple(streams.COEFFICIENTS)) == noise.constants()
    assert all(getattr(each, p.name) == p for p in Purpose for each in (noise, streams))


def test_words_equal_bit_for_bit():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**32, (7, 2))
    positions, choices = rng.integers(0, 2**20, 7), rng.integers(0, 8, 7)
    purposes = np.array([Purpose(i % 5) for i in range(7)])
    want = spec.token_words(keys, positions, choices, purposes, 1003)
    as_tensor = torch.from_numpy
    got = noise.token_words(
        as_tensor(keys), as_tensor(positions), as_tensor(choices), as_tensor(purposes), 1003
    )
    assert np.array_equal(got.numpy(), want.astype(np.int64))
    ids = as_tensor(rng.integers(0, 1003, (7, 5)))
    some = noise.words_of(
        as_tensor(keys), as_tensor(positions), as_tensor(choices), as_tensor(purposes), ids
    )
    assert torch.equal(some, got.gather(1, ids))
    scalars = noise.scalar_words(
        as_tensor(keys), as_tensor(positions), as_tensor(choices), as_tensor(purposes)
    )
    assert np.array_equal(scalars.numpy(), want[:, 0].astype(np.int64))


def test_uniform_and_exponential_equal_bit_for_bit():
    edges = np.array([0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    x = np.concatenate([edges, np.random.default_rng(2).integers(0, 2**32, 300_000)])
    x = x.astype(np.uint32)
    words = torch.from_numpy(x.astype(np.int64))
    assert np.array_equal(
        noise.uniform(words).numpy().view(np.int32), spec.uniform(x).view(np.int32)
    )
    assert np.array_equal(
        noise.exponential(words).numpy().view(np.int32), spec.exponential(x).view(np.int32)
    )
