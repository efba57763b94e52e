from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cbatch.runtime.model.gguf_blocks import dequantised, rounded_to_q8_0
from cbatch.runtime.model.gguf_file import TYPES

BYTES = {each.name: each.bytes for each in TYPES.values()}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


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
    for at in plain or ():
        raw[:, at + 3] &= 0xBF  # no NaN
    if name in ("F16", "BF16"):
        raw[:, 1] &= 0xBF
    return raw


# Expected values for 3 blocks, by the reference's own package: a checksum of the fp32 values, and
# two of them.
GOLDEN: dict[str, tuple[int, float, float]] = {
    "F32": (0x33A2C75A, -6.867121366423683e-34, -0.002951542381197214),
    "F16": (0x93793922, 0.218994140625, 0.011383056640625),
    "Q4_0": (0x0A7F512B, 3.599609375, -4.3984375),
    "Q4_1": (0x2B81FE67, -10.798828125, 14.294921875),
    "Q5_0": (0x08FCBDDD, 1.7998046875, 4.3984375),
    "Q5_1": (0xD5D73A65, -23.3974609375, 29.689453125),
    "Q8_0": (0xD2E8B4D8, -89.990234375, 127.5546875),
    "Q4_K": (0xAFDA8BDA, -32.396484375, 30.7890625),
    "Q5_K": (0x3CC52FA0, -210.5771484375, 372.767578125),
    "Q6_K": (0x2AA03D90, 1111.37939453125, -1329.427734375),
    "IQ4_NL": (0x6A1E618F, 19.7978515625, -53.880859375),
    "IQ4_XS": (0xF37C90EB, -8.09912109375, 1002.84375),
    "BF16": (0xF5273CCA, 4.765752237290144e-10, 1.3755815063409838e-18),
}


@pytest.mark.parametrize("name", BYTES)
def test_golden_blocks(name: str) -> None:
    values = dequantised(name, blocks(name, 3), torch.float32)
    checksum, first, last = GOLDEN[name]
    assert (values[0].item(), values[-1].item()) == pytest.approx((first, last), rel=1e-6)
    assert zlib.crc32(values.numpy().tobytes()) == checksum


@pytest.mark.parametrize("name", BYTES)
def test_values_are_the_references(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    stored = blocks(name, 300)
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[name]).ravel()
    values = dequantised(name, stored, torch.float32)
    assert values.numpy().tobytes() == expected.astype(np.float32).tobytes()
    assert torch.equal(dequantised(name, stored, torch.bfloat16), values.bfloat16())


def test_many_blocks_are_taken_in_parts() -> None:
    stored = np.tile(blocks("Q4_0", 3), (50_000, 1))
    values = dequantised("Q4_0", stored, torch.bfloat16)
    assert torch.equal(values, dequantised("Q4_0", stored[:3], torch.bfloat16).repeat(50_000))


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
