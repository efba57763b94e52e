"""Rotary position embedding (arXiv:2104.09864) with the scalings of the supported families."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cbatch.runtime.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2], in radians per token.

    Computed in fp32 in the order transformers does: at far positions the rounding of a frequency
    is a visible angle, and checkpoints were trained with that rounding.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = rope.theta**exponents
    if rope.type == "linear":
        return (1.0 / base) / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / base)
    if rope.type == "yarn":
        return _yarn(rope, base, head_dim)
    return 1.0 / base


def _llama3(rope: RopeConfig, freq: Tensor) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    original = rope.original_max_position_tokens
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelength = 2 * math.pi / freq
    scaled = torch.where(wavelength > longest, freq / rope.factor, freq)
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)


def _yarn(rope: RopeConfig, base: Tensor, head_dim: int) -> Tensor:
    """YaRN, section 3.2: a ramp over dimensions from extrapolation to interpolation."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step; the ramp below divides by the width
    dims = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * base)) * (1 - keep) + (1.0 / base) * keep


class RotaryTable:
    """cos + i sin by position, grown on demand so that a long context costs nothing unused."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._attention_factor = rope.attention_factor
        self._score_scale = head_dim**-0.5
        self._table = self._compute(256)

    def rows(self, positions: Tensor, last_position: int) -> Tensor:
        """complex64 [T, 2, head_dim / 2]: the turn of queries, which also scales scores by
        1 / sqrt(head_dim), and that of keys. int64 `positions` [T], none beyond `last_position`."""
        if last_position >= len(self._table):
            self._table = self._compute(max(last_position + 1, 2 * len(self._table)))
        return self._table.index_select(0, positions)

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._frequencies.device)
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        keys = torch.complex(cos, sin)
        return torch.stack([keys * self._score_scale, keys], dim=1)


def interleave_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from (x_0.., y_0..) to (x_0, y_0, x_1, y_1, ..).

    Checkpoints rotate pairs that lie half a head apart. With pairs side by side the rotation is one
    complex product; scores do not change, since queries and keys are reordered alike.
    """
    pairs = weight.unflatten(0, (-1, 2, head_dim // 2))
    return pairs.transpose(1, 2).reshape(weight.shape)
