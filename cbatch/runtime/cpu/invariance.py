"""Tests whether a model is batch-invariant on this machine, by comparing bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled import build_name
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.state_memory import pages_of_blocks

_BLOCK_SIZE_TOKENS = 16
_PROBE_SEQUENCES, _PROBE_TOKENS = 2, 20  # a large model takes about a second for these


class InvarianceReport(NamedTuple):
    """The result of `probe_batch_invariance`. `products`: what computes products; `kernels`: the
    build of our own kernels, if all products use them; `forward`: whether logits of whole passes
    are the same in several batches."""

    mode: str
    products: tuple[str, ...]
    kernels: str | None
    forward: bool

    @property
    def batch_invariant(self) -> bool:
        return self.kernels is not None and self.forward

    def __str__(self) -> str:
        answer = f"batch_invariant: {'yes' if self.batch_invariant else 'no'}"
        detail = [f"numerics={self.mode}", f"products: {' and '.join(self.products)}"]
        if self.kernels is not None:
            detail.append(f"kernels: {self.kernels}")
        return f"{answer} ({'; '.join(detail)})"


@torch.inference_mode()
def probe_batch_invariance(model: Model) -> InvarianceReport:
    """Return whether our kernels compute all products, and logits of whole passes have the same
    bits in several batches. The result does not depend on the requested numerics."""
    linears = list(model.linears())
    products = tuple(sorted({linear.description for linear in linears}))
    compiled = all(linear.compiled is not None for linear in linears)
    kernels = build_name() if compiled else None
    forward = compiled and _forward_invariant(model)
    return InvarianceReport(model.numerics, products, kernels, forward)


def _forward_invariant(model: Model) -> bool:
    """Compare the same sequences token by token, in one chunk, and batched in other blocks."""
    length = min(_PROBE_TOKENS, model.config.max_position_tokens)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (_PROBE_SEQUENCES, length))
    whole = _Probe(model, tokens, reverse=False).run([length])
    cut = [1, 1, 5, length]
    single = [_Probe(model, each[None], reverse=True).run(cut)[0] for each in tokens]
    mixed = _Probe(model, tokens, reverse=True).run([length // 2, 1, 3, length])
    return all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(whole, single, mixed, strict=True)
    )


class _Probe:
    def __init__(self, model: Model, tokens: np.ndarray, *, reverse: bool) -> None:
        self.model, self.tokens = model, tokens
        count, length = tokens.shape
        width = -(-length // _BLOCK_SIZE_TOKENS)
        blocks = np.arange(count * width, dtype=np.int32).reshape(count, width)
        self.tables = blocks[::-1, ::-1].copy() if reverse else blocks
        sizes = blocks.size, _BLOCK_SIZE_TOKENS, model.dtype, model.device
        self.kv = KVCache(model.config, *sizes, num_pages=blocks.size, num_slots=count)

    def run(self, chunks: list[int]) -> list[Tensor]:
        """Return the logits [length, vocab] of each sequence, computed `chunks` tokens at a
        time."""
        count, length = self.tokens.shape
        logits: list[list[Tensor]] = [[] for _ in range(count)]
        at = 0
        for chunk in chunks:
            n = min(chunk, length - at)
            if n < 1:
                break
            flat = self.tokens[:, at : at + n].reshape(-1)
            batch = RaggedBatch(
                tokens=torch.from_numpy(flat),
                positions=torch.arange(at, at + n).repeat(count),
                query_lens=np.full(count, n, dtype=np.int32),
                context_lens=np.full(count, at + n, dtype=np.int32),
                block_tables=self.tables,
                logits_index=torch.arange(count * n),
                state_tables=pages_of_blocks(self.tables),
                state_slots=np.arange(count, dtype=np.int32),
            )
            for parts, rows in zip(
                logits, self.model.forward(batch, self.kv).split(n), strict=True
            ):
                parts.append(rows)
            at += n
        return [torch.cat(parts) for parts in logits]
