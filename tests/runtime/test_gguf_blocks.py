"""Blocks of GGUF files: values as gguf's own package gives them, and rounding to Q8_0."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cbatch.runtime.model.gguf_blocks import dequantised, rounded_to_q8_0
from cbatch.runtime.model.gguf_file import TYPES

BYTES = {each.name: each.bytes for each in TYPES.values()}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"MXFP4": ()}


def blocks(name: str, count: int) -> NDArray[np.uint8]:
    """Return blocks of random bits, except scales in fp16, which are ordinary numbers of either
    sign. They are the same on every machine."""
    size = BYTES[name]
    state = np.arange(count * size, dtype=np.uint64) * 2654435761 + len(name) * 97
    raw = (state >> 7 ^ state >> 19).astype(np.uint8).reshape(count, size)
    plain = {"F32": range(0, size, 4), "F16": (), "BF16": ()}.get(name)
    for at in HALVES.get(name, (0,)) if plain is None else ():
        scales = np.linspace(-0.9, 1.1, count).astype("<f2").view(np.uint8)
        raw[:, at : at + 2] = scales.reshape(count, 2)
    if name == "MXFP4":  # ordinary powers, after some so small that the scale is subnormal
        raw[:, 0] = np.where(np.arange(count) < 4, raw[:, 0] & 1, 100 + raw[:, 0] % 28)
    for at in plain or ():
        raw[:, at + 3] &= 0xBF  # no NaN
    if name in ("F16", "BF16"):
        raw[:, 1] &= 0xBF
    return raw


@pytest.mark.parametrize("name", BYTES)
def test_values_are_the_references(name: str) -> None:
    stored = blocks(name, 300)
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[name]).ravel()
    values = dequantised(name, stored, torch.float32)
    assert values.numpy().tobytes() == expected.astype(np.float32).tobytes()
    assert torch.equal(dequantised(name, stored, torch.bfloat16), values.bfloat16())


def test_many_blocks_are_taken_in_parts() -> None:
    stored = np.tile(blocks("Q4_0", 3), (20_000, 1))
    values = dequantised("Q4_0", stored, torch.bfloat16)
    assert torch.equal(values, dequantised("Q4_0", stored[:3], torch.bfloat16).repeat(20_000))


def test_rounding_to_q8_0_moves_a_weight_by_half_a_code_and_what_is_rounded_not_at_all() -> None:
    matrix = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    matrix[1, 32:64] = 0
    stored = rounded_to_q8_0(matrix)
    assert stored.shape == (5, 3 * 34)
    rounded = dequantised("Q8_0", stored.reshape(-1, 34), torch.float32).view(5, 3, 32)
    largest = matrix.view(5, 3, 32).abs().amax(-1, keepdim=True)
    # The scale is rounded to fp16, too: 127 codes with a relative error of 2^-11.
    error = (rounded - matrix.view(5, 3, 32)).abs()
    assert (error <= largest / 127 * (0.5 + 127 / 2048) + 1e-6).all()
    assert error.max() > 1e-4
    assert (rounded_to_q8_0(rounded.view(5, 96)) == stored).all()
