"""Micro-benchmark (`pytest bench --benchmark-enable`) of the rejection sampler, torch on the CPU,
with the demo's vocabulary. Logits are made before the timer starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cbatch.runtime.cpu.verify import RowsToVerify, verify
from cbatch.runtime.input_batch import InputBatch

VOCAB_SIZE, BLOCK_TOKENS, PEAK = 4096, 16, 12.0  # PEAK: logit of a likeliest token


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejects"])
def test_verify(benchmark, mode, rows, k):
    """Verify drafts. All but the last draft of a row are the target's likeliest tokens."""
    table = _table(mode, rows)
    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(0, VOCAB_SIZE, (rows, max(k, 1)), generator=generator)
    logits = torch.randn(rows, k + 1, VOCAB_SIZE, generator=generator)
    agreed = max(k - 1, 0)
    logits[:, :agreed].scatter_add_(
        2, drafts[:, :agreed, None], torch.full((rows, agreed, 1), PEAK)
    )
    logits = logits.flatten(0, 1)
    probs = torch.softmax(torch.randn(rows * k, VOCAB_SIZE, generator=generator), dim=-1)
    rows_to_verify = RowsToVerify(
        slots=np.arange(rows),
        known=np.full(rows, 64),
        num_drafted=np.full(rows, k),
        drafts=drafts.numpy() if k else None,
        probs=probs if k and mode == "rejects" else None,
    )
    verified = benchmark(verify, logits, rows_to_verify, table)
    assert not verified.status.any()
    assert (verified.num_accepted >= agreed).all()


def _table(mode: str, rows: int) -> InputBatch:
    table = InputBatch(rows, BLOCK_TOKENS, VOCAB_SIZE)
    table.keys[:] = np.arange(2 * rows).reshape(rows, 2)
    table.greedy[:] = False
    getattr(table, mode)[:] = True
    if mode != "greedy":
        table.temperature[:] = 0.8
        table.top_p[:] = 0.95
    return table
