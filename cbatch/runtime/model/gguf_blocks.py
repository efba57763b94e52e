"""Dequantisation of GGUF's block types. The operations have the order of ggml's reference, so that
fp32 values are the same to the bit.

d and m are a block's scale and offset in fp16, q its codes. A byte holds two codes of 4 bits. First
come the low codes of some consecutive bytes, then the high codes of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_VALUES_PER_STEP = 1 << 22  # so that fp32 intermediates are small compared with a tensor
_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
_IQ4 = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


def dequantised(name: str, blocks: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Return all values of `blocks` [count, bytes of a block] of the type `name`, flat."""
    stored = torch.from_numpy(blocks)
    if name in _PLAIN:
        return stored.view(_PLAIN[name]).flatten().to(dtype)
    values = _VALUES[name]
    width = values(stored[:1]).shape[1]
    values_out = torch.empty(len(stored), width, dtype=dtype)
    step = _VALUES_PER_STEP // width
    for at in range(0, len(stored), step):
        values_out[at : at + step] = values(stored[at : at + step])
    return values_out.flatten()


def rounded_to_q8_0(matrix: Tensor) -> NDArray[np.uint8]:
    """Quantise rows [out, columns], columns a multiple of 32: uint8 [out, columns / 32 * 34]."""
    parts = []
    for rows in matrix.split(max(1, _VALUES_PER_STEP // matrix.shape[1])):
        values = rows.float().unflatten(1, (-1, 32))
        scales = values.abs().amax(-1, keepdim=True) / 127
        codes = (values / scales.clamp(min=1e-30)).round().clamp(-127, 127).to(torch.int8)
        bits = scales.half().view(torch.uint8)
        parts.append(torch.cat([bits, codes.view(torch.uint8)], dim=-1).flatten(1))
    return torch.cat(parts).numpy()


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at byte `at` of every block, as fp32 [count, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """Return the codes in the last dimension: all low codes, then all high codes."""
    return torch.cat([codes & 15, codes >> 4], dim=-1)


def _bits(words: Tensor) -> Tensor:
    """Unpack bits: [count, bytes] -> [count, 8 * bytes], the lowest bit of a byte first."""
    return (words.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].view(torch.int8)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return _half(b, 0) * (q.float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return _half(b, 0) * q + _half(b, 2)


def _mxfp4(b: Tensor) -> Tensor:
    # The scale of the doubled values is 2^(e - 128), which is subnormal for small e.
    scales = torch.exp2(b[:, :1].double() - 128).float()
    return scales * _FP4[_nibbles(b[:, 1:]).int()]


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets of 8 sub-blocks, fp32 [count, 8, 1]. They have 6 bits each, in 12
    bytes; the bytes of the first four have the upper two bits of the last four."""
    first, second, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], dim=1)
    offsets = torch.cat([second & 63, last >> 4 | second >> 6 << 4], dim=1)
    return (_half(b, 0) * scales).unsqueeze(2), (_half(b, 2) * offsets).unsqueeze(2)


def _q4_k(b: Tensor) -> Tensor:
    scales, offsets = _k_scales(b)
    q = _nibbles(b[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return (scales * q - offsets).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scales, offsets = _k_scales(b)
    q = _nibbles(b[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    # Bit j of the byte for column i belongs to column i of sub-block j.
    fifth = b[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return (scales * (q | fifth << 4) - offsets).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = b[:, :128].unflatten(1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = b[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    q = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = _half(b, 208) * b[:, 192:208].view(torch.int8)
    return (scales.unsqueeze(2) * q).flatten(1)


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * _IQ4[_nibbles(b[:, 2:]).int()]


def _iq4_xs(b: Tensor) -> Tensor:
    # Scales have 6 bits: low 4 bits in bytes 4 to 8, upper two bits in bytes 2 and 3.
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], dim=2).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = (b[:, 2:4].unsqueeze(2) >> shifts & 3).flatten(1)
    scales = _half(b, 0) * ((low | high << 4).float() - 32)
    q = _nibbles(b[:, 8:].unflatten(1, (8, 16)))
    return (scales.unsqueeze(2) * _IQ4[q.int()]).flatten(1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
