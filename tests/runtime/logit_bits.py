"""Digests of logits as a fresh process computes them: `python -m tests.runtime.logit_bits MODEL`, a
line for each model (that one and the demo's), dtype and mode."""

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from cbatch.demo import demo_paths
from cbatch.runtime.cpu.decoder import Model, RaggedBatch, load_model
from cbatch.runtime.model.kv_cache import KVCache

BLOCK_SIZE_TOKENS = 16


def digest(model: Model) -> str:
    """Of the logits of steps of 1, 8 and 32 prompts of 3 tokens."""
    found = hashlib.sha256()
    for rows in (1, 8, 32):
        kv = KVCache(model.config, rows, BLOCK_SIZE_TOKENS, model.dtype, "cpu")
        lens = np.full(rows, 3, dtype=np.int32)
        positions = torch.arange(3).repeat(rows)
        tables = np.arange(rows, dtype=np.int32)[:, None]
        every = torch.arange(3 * rows)
        batch = RaggedBatch(every + 5, positions, lens, lens, tables, every)
        found.update(model.forward(batch, kv).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    models = Path(sys.argv[1]), demo_paths()[0]
    for path, dtype, mode in itertools.product(
        models, ("float32", "bfloat16"), ("auto", "invariant")
    ):
        model = load_model(path, dtype=dtype, numerics=mode)
        print(path.name, dtype, mode, model.numerics, digest(model))


if __name__ == "__main__":
    main()
