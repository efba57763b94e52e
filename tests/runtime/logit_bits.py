"""Digests of logits, for comparison between processes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.kv_cache import KVCache

BLOCK_SIZE_TOKENS = 16


def digest(model: Model) -> str:
    """Return a digest of the logits of steps of 1, 8 and 32 prompts of 3 tokens, and of 2 long
    ones."""
    checksum = hashlib.sha256()
    for rows, length in ((1, 3), (8, 3), (32, 3), (2, 300)):
        width = -(-length // BLOCK_SIZE_TOKENS)
        kv = KVCache(model.config, rows * width, BLOCK_SIZE_TOKENS, model.dtype, "cpu")
        lens = np.full(rows, length, dtype=np.int32)
        positions = torch.arange(length).repeat(rows)
        tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        every = torch.arange(rows * length)
        tokens = 5 + every % 96
        batch = RaggedBatch(tokens, positions, lens, lens, tables, every)
        checksum.update(model.forward(batch, kv).numpy().tobytes())
    return checksum.hexdigest()


def digests(*models: Path) -> Iterator[str]:
    """Yield a line for each model and dtype."""
    for path, dtype in itertools.product(models, ("float32", "bfloat16")):
        model = load_model(path, dtype=dtype)
        yield f"{path.name} {dtype} {model.numerics} {digest(model)}"
