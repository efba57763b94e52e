"""Rotary position embedding (arXiv:2104.09864) with the scalings of the supported families."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig, RopeConfig

_FIRST_POSITIONS = 256
ROW_GAP = 8  # complex numbers between rows: 64 bytes, to keep them aligned


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2], in radians per token; 0 where dimensions do not rotate.

    Computed in fp32 in the order transformers does: at far positions the rounding of a frequency
    is a visible angle, and checkpoints were trained with that rounding.
    """
    rotated = rope.rotated(head_dim)
    found = torch.zeros(head_dim // 2)
    if rotated:
        found[: rotated // 2] = _scaled_frequencies(rope, rotated)
    return found


def has_angles(config: ModelConfig) -> bool:
    """Whether each position of the context has finite ones: fields may each be a number, and their
    quotients and logarithms none."""
    try:
        ropes = {config.rope, *config.arithmetic.layer_ropes}
        fastest = max(inverse_frequencies(r, config.head_dim).max().item() for r in ropes)
    except (ArithmeticError, ValueError):
        return False
    return fastest * config.max_position_tokens < torch.finfo(torch.float32).max


def _scaled_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = rope.theta**exponents
    if rope.type == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * base)
    found = 1.0 / base
    if rope.type == "linear":
        found = found / rope.factor
    elif rope.type == "llama3":
        found = _llama3(rope, found)
    elif rope.type == "yarn":
        found = _yarn(rope, base, head_dim)
    return found / torch.tensor(rope.divisors) if rope.divisors else found


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
    """The factors that rotate a row of the fused projection, by position.

    A row is [kv_heads, group + 2, head_dim]: queries, then K, then V of each KV head, pairs of
    dimensions side by side. Queries are rotated by cos + i sin and scaled by 1 / sqrt(head_dim) (so
    that scores need no scaling), keys are rotated, values multiplied by 1.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        kv_heads: int,
        group: int,
        device: torch.device,
    ) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).numpy()
        rotates = np.arange(head_dim // 2) < rope.rotated(head_dim) // 2
        self._attention_factor = np.where(rotates, np.float32(rope.attention_factor), np.float32(1))
        self._device = device
        self._score_scale = head_dim**-0.5
        self._kv_heads, self._group = kv_heads, group
        self._width = kv_heads * (group + 2) * head_dim // 2
        self._by_position = self._segment(0, _FIRST_POSITIONS)

    def rows(self, positions: Tensor, last_position: int) -> Tensor:
        """complex64 [T, row_width / 2] of int64 `positions` [T], none beyond `last_position`.

        Rows have a gap between them, so that an operation on several rows is never merged into one
        loop, whose end (scalar code) would lie elsewhere for every row count.
        """
        while last_position >= len(self._by_position):
            self._grow()
        return self._expand(self._by_position.index_select(0, positions))[:, : self._width]

    def cos_sin(self, count: int) -> Tensor:
        """cos and sin of positions [0, count): fp32 [count, head_dim / 2, 2]; the factors of keys
        in `rows`, bit for bit."""
        while count > len(self._by_position):
            self._grow()
        return torch.view_as_real(self._by_position[:count]).contiguous()

    def _grow(self) -> None:
        have = len(self._by_position)
        self._by_position = torch.cat([self._by_position, self._segment(have, 2 * have)])

    def _segment(self, start: int, stop: int) -> Tensor:
        """cos + i sin of positions [start, stop): complex64 [positions, head_dim / 2].

        In fp64, then rounded: how a library rounds a cosine of fp32 depends on its place in the
        call, and on how many threads share the call.
        """
        positions = np.arange(start, stop, dtype=np.float32)
        angles = (positions[:, None] * self._frequencies).astype(np.float64)
        found = np.empty(angles.shape, dtype=np.complex64)
        found.real = np.cos(angles).astype(np.float32) * self._attention_factor
        found.imag = np.sin(angles).astype(np.float32) * self._attention_factor
        return torch.from_numpy(found).to(self._device)

    def _expand(self, keys: Tensor) -> Tensor:
        """complex64 [T, row_width / 2 + gap] from [T, head_dim / 2]."""
        count, half = keys.shape
        found = keys.new_ones(count, self._width + ROW_GAP)
        roles = found[:, : self._width].unflatten(1, (self._kv_heads, self._group + 2, half))
        roles[:, :, : self._group] = (keys * self._score_scale)[:, None, None]
        roles[:, :, self._group] = keys[:, None]
        return found


def interleave_halves(weight: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Reorder the rotated rows of each head from (x_0.., y_0..) to (x_0, y_0, x_1, y_1, ..).

    Unless the rope is `interleaved`, a checkpoint's pairs are half of the rotated dimensions apart.
    With pairs side by side the rotation is one complex product. Scores do not change, since queries
    and keys have the same order.
    """
    if rope.interleaved:
        return weight
    heads, rotated = weight.unflatten(0, (-1, head_dim)), rope.rotated(head_dim)
    pairs = heads[:, :rotated].unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotated:]], dim=1).reshape(weight.shape)
