"""Rotary position embedding (arXiv:2104.09864) with the scalings of the supported families."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention, Rope

_FIRST_POSITIONS = 256


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the frequencies, fp32 [head_dim / 2], in radians per token; 0 for dimensions that do
    not rotate.

    Computed in fp32 in the same order as transformers. At far positions the rounding of a frequency
    changes the angle visibly, and checkpoints were trained with that rounding.
    """
    rotated = rope.rotated(head_dim)
    frequencies = torch.zeros(head_dim // 2)
    if rotated and rope.type != "none":
        frequencies[: rotated // 2] = _scaled_frequencies(rope, rotated)
    return frequencies


def has_angles(config: ModelConfig) -> bool:
    """Return whether all angles up to the context length are finite. Valid fields may have
    quotients or logarithms that are not finite."""
    try:
        mixers = [each.mixer for each in config.layers if isinstance(each.mixer, Attention)]
        ropes = {(mixer.rope, mixer.key_dim) for mixer in mixers}
        fastest = max((inverse_frequencies(*each).max().item() for each in ropes), default=0.0)
    except (ArithmeticError, ValueError):
        return False
    return fastest * config.max_position_tokens < torch.finfo(torch.float32).max


def _scaled_frequencies(rope: Rope, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = rope.theta**exponents
    if rope.type == "proportional":
        rotates = torch.arange(head_dim // 2) < int(rope.share * head_dim // 2)
        return torch.where(rotates, 1.0 / base, 0.0) / rope.factor
    if rope.type == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * base)
    frequencies = 1.0 / base
    if rope.type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        frequencies = _yarn(rope, base, head_dim)
    return frequencies / torch.tensor(rope.divisors) if rope.divisors else frequencies


def _llama3(rope: Rope, freq: Tensor) -> Tensor:
    """Divide long wavelengths by `factor`, keep short ones, interpolate those between."""
    original = rope.original_max_position_tokens
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelength = 2 * math.pi / freq
    scaled = torch.where(wavelength > longest, freq / rope.factor, freq)
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)


def _yarn(rope: Rope, base: Tensor, head_dim: int) -> Tensor:
    """Return YaRN's frequencies (section 3.2): a ramp from extrapolation to interpolation."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step function; the ramp divides by high - low
    dims = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * base)) * (1 - keep) + (1.0 / base) * keep


class RotaryTable:
    """The factors cos + i sin that rotate pairs of adjacent dimensions, by position."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device | str) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).numpy()
        rotates = np.arange(head_dim // 2) < rope.rotated(head_dim) // 2
        self._attention_factor = np.where(rotates, np.float32(rope.attention_factor), np.float32(1))
        self._device = device
        self._by_position = self._segment(0, _FIRST_POSITIONS)

    def cos_sin(self, count: int) -> Tensor:
        """Return cos and sin of positions [0, count), fp32 [count, head_dim / 2, 2]."""
        while count > len(self._by_position):
            self._grow()
        return torch.view_as_real(self._by_position[:count]).contiguous()

    def _grow(self) -> None:
        length = len(self._by_position)
        self._by_position = torch.cat([self._by_position, self._segment(length, 2 * length)])

    def _segment(self, start: int, stop: int) -> Tensor:
        """Return cos + i sin of positions [start, stop), complex64 [positions, head_dim / 2].

        Computed in fp64, then rounded. The rounding of a library's fp32 cosine depends on the
        element's place in the call and on the number of threads.
        """
        positions = np.arange(start, stop, dtype=np.float32)
        angles = (positions[:, None] * self._frequencies).astype(np.float64)
        factors = np.empty(angles.shape, dtype=np.complex64)
        factors.real = np.cos(angles).astype(np.float32) * self._attention_factor
        factors.imag = np.sin(angles).astype(np.float32) * self._attention_factor
        return torch.from_numpy(factors).to(self._device)


def interleave_halves(weight: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Reorder the rotated rows of each head from (x_0.., y_0..) to (x_0, y_0, x_1, y_1, ..).

    In most checkpoints the dimensions of a pair are half of the rotated dimensions apart; with
    `rope.interleaved` they are adjacent already. With adjacent pairs a rotation is one complex
    product. Scores do not change, since queries and keys have the same order.
    """
    if rope.interleaved:
        return weight
    heads, rotated = weight.unflatten(0, (-1, head_dim)), rope.rotated(head_dim)
    pairs = heads[:, :rotated].unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotated:]], dim=1).reshape(weight.shape)
