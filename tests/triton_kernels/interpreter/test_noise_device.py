"""The noise in kernels has the bits of the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.core.request import noise as specification
from triton_kernels.noise import device as noise_device

pytestmark = pytest.mark.usefixtures("device")

ROWS, BLOCK = 16, 128
# Edges of the exponential: both ends, and where its branches meet.
EDGES = [0, 1, 2, 2**24 - 1, 2**24, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 2, 2**32 - 1]


@triton.jit
def draw_kernel(
    keys_ptr, positions_ptr, choices_ptr, purposes_ptr, words_ptr, some_ptr, first_ptr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, tile = tl.arange(0, ROWS), tl.program_id(0)
    seeds = noise_device.load_seeds(keys_ptr, row)
    positions, choices = tl.load(positions_ptr + row), tl.load(choices_ptr + row)
    purposes = tl.load(purposes_ptr + row)
    out = row[:, None] * 2 * BLOCK + tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    of_rows = (positions[:, None], choices[:, None], purposes[:, None])
    groups = tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :] + row[:, None] * 0
    words = noise_device.run_words(
        seeds[:, None], groups, of_rows[0], of_rows[1], of_rows[2], ROWS, BLOCK
    )
    tl.store(words_ptr + out, words.to(tl.int64))
    # Any ids, in no order.
    ids = (tile * BLOCK + tl.arange(0, BLOCK)[None, :]) * 7 % (2 * BLOCK) + row[:, None] * 0
    some = noise_device.words_of(seeds[:, None], ids, of_rows[0], of_rows[1], of_rows[2])
    tl.store(some_ptr + row[:, None] * 2 * BLOCK + ids, some.to(tl.int64))
    first = noise_device.scalar_words(seeds, positions, choices, purposes)
    tl.store(first_ptr + row, first.to(tl.int64), mask=tile + row * 0 == 0)


@triton.jit
def map_kernel(words_ptr, uniforms_ptr, exponentials_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32)
    tl.store(uniforms_ptr + at, noise_device.uniform(words))
    tl.store(exponentials_ptr + at, noise_device.exponential(words))


def drawn() -> tuple[Tensor, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (ROWS, 2))
    keys[:2] = 2**32 - 1
    positions, choices = rng.integers(0, 2**31, ROWS), rng.integers(0, 9, ROWS)
    purposes = rng.integers(0, 5, ROWS)
    words = torch.zeros(2, ROWS, 2 * BLOCK, dtype=torch.int64)
    first = torch.zeros(ROWS, dtype=torch.int64)
    arguments = [torch.from_numpy(x) for x in (keys, positions, choices, purposes)]
    draw_kernel[(2,)](*arguments, *words, first, ROWS=ROWS, BLOCK=BLOCK)
    assert torch.equal(first, words[0, :, 0])
    return words, specification.token_words(keys, positions, choices, purposes, 2 * BLOCK)


def test_words_are_those_of_the_specification() -> None:
    words, expected = drawn()
    assert np.array_equal(words[0].numpy(), expected)
    assert np.array_equal(words[1].numpy(), expected)


def mapped() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    words = np.random.default_rng(1).integers(0, 2**32, 1 << 16)
    words[: len(EDGES)] = EDGES
    uniforms, exponentials = torch.zeros(2, len(words))
    map_kernel[(16,)](
        torch.from_numpy(words), uniforms, exponentials, BLOCK=len(words) // 16,
        enable_fp_fusion=False,
    )  # fmt: skip
    return words.astype(np.uint32), uniforms.numpy(), exponentials.numpy()


def test_uniform_and_exponential_have_the_same_bits() -> None:
    words, uniforms, exponentials = mapped()
    assert np.array_equal(uniforms, specification.uniform(words))
    expected = specification.exponential(words)
    assert np.array_equal(exponentials.view(np.int32), expected.view(np.int32))
