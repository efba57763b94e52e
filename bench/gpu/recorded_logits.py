"""Realistic logits: recorded from SmolLM2-135M over a text, and stretched to any vocabulary.

Random logits are nearly flat, so a nucleus holds half of the vocabulary. A model's logits are
peaked: with temperature 0.8 and top_p 0.9 the nuclei of the recorded rows hold 1 to 874 tokens,
half of them at most 9. Benchmarks time both.

    python -m bench.gpu.recorded_logits FILE      # records again, from the text in FILE
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.model_files import find_model, tokenizer_of
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.kv_cache import KVCache

DATA = Path(__file__).parent / "data" / "recorded_logits.npz"
ROWS, VOCAB = 64, 49_152  # as recorded
_ROW_STEP = 15  # tokens of the text between two recorded rows
_FIXED_RANKS = 1024  # first ranks, whose logits are equal for every vocabulary
_EXACT, _KNOTS = 64, 200  # number of first ranks that are all stored; number of stored ranks


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


def record(text: str) -> LogitProfiles:
    """Record SmolLM2's logits after every 15th of the last 960 of the text's first 1,024 tokens."""
    path = find_model("smollm2")
    count = 1024
    ids = torch.tensor(tokenizer_of(path).encode(text)[:count])
    if len(ids) < count:
        raise ValueError(f"text: {len(ids)} tokens, {count} are needed")
    model, lens = load_model(path), np.array([count], dtype=np.int32)
    kv = KVCache(model.config, 1, count, model.dtype, model.device)
    logit_rows = torch.arange(count - ROWS * _ROW_STEP, count, _ROW_STEP)
    one_block = np.zeros((1, 1), dtype=np.int32)
    batch = RaggedBatch(ids, torch.arange(count), lens, lens, one_block, logit_rows)
    logits = model.forward(batch, kv).float().sort(dim=-1, descending=True).values.numpy()
    spaced = np.geomspace(_EXACT, VOCAB - 1, _KNOTS - _EXACT).round()
    ranks = np.unique(np.concatenate((np.arange(_EXACT), spaced))).astype(np.int64)
    return LogitProfiles(ranks, logits[:, ranks])


def main() -> None:
    recorded = record(Path(sys.argv[1]).read_text())
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        DATA, ranks=recorded.ranks.astype(np.int32), logits=recorded.logits.astype(np.float16)
    )


if __name__ == "__main__":
    main()
