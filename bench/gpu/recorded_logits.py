"""Realistic logits: recorded from SmolLM2-135M over a text, and stretched to any vocabulary.

Random logits are nearly flat, so a nucleus holds half of the vocabulary. A model's logits are
peaked: with temperature 0.8 and top_p 0.9 the nuclei of the recorded rows hold 1 to 874 tokens,
half of them at most 9. Benchmarks time both. The rows are 15 tokens apart; of their sorted logits
the first 64 are stored, and 136 others at ranks in geometric progression.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DATA = Path(__file__).parent / "data" / "recorded_logits.npz"
ROWS, VOCAB = 64, 49_152  # as recorded
_FIXED_RANKS = 1024  # first ranks, whose logits are equal for every vocabulary


class LogitProfiles(NamedTuple):
    """Sorted logits of recorded rows, at some of their ranks."""

    ranks: NDArray[np.int64]  # [K], ascending from 0 to VOCAB - 1
    logits: NDArray[np.float32]  # [ROWS, K], descending


@functools.cache
def load() -> LogitProfiles:
    with np.load(DATA) as file:
        return LogitProfiles(file["ranks"].astype(np.int64), file["logits"].astype(np.float32))


@functools.cache
def profiles(vocab: int) -> NDArray[np.float32]:
    """Return the sorted logits of every recorded row, [ROWS, vocab], descending.

    The first 1,024 ranks keep their logits; the others are stretched to the vocabulary. Raises
    ValueError for a vocabulary of fewer than 2,048 tokens.
    """
    if vocab < 2 * _FIXED_RANKS:
        raise ValueError(f"vocab: {vocab} tokens, at least {2 * _FIXED_RANKS} are needed")
    recorded, rank = load(), np.arange(vocab, dtype=np.float64)
    stretch = (VOCAB - 1 - _FIXED_RANKS) / (vocab - 1 - _FIXED_RANKS)
    rank[_FIXED_RANKS:] = _FIXED_RANKS + (rank[_FIXED_RANKS:] - _FIXED_RANKS) * stretch
    at, knots = np.log1p(rank), np.log1p(recorded.ranks)
    return np.stack([np.interp(at, knots, row) for row in recorded.logits]).astype(np.float32)


def recorded_logits(
    rows: int,
    vocab: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tensor:
    """Return logits [rows, vocab]. Row i has the recorded profile i modulo 64, with its tokens in
    random order."""
    generator = torch.Generator(device).manual_seed(seed)
    sorted_logits = torch.from_numpy(profiles(vocab)).to(device, dtype)
    logits = torch.empty((rows, vocab), dtype=dtype, device=device)
    for at in range(rows):
        order = torch.randperm(vocab, generator=generator, device=device)
        logits[at, order] = sorted_logits[at % ROWS]
    return logits
