"""A decoder's pass over a batch on the host, in one call, for self-tests before it serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.gpu.attention import PagedAttention, Tuning, heads_of
from cbatch.runtime.gpu.decoder import FlatTokens, Hidden
from cbatch.runtime.kv_cache import KVCache


class OneCall:
    """A decoder whose `forward` has the arguments of the CPU's `Model`, for self-tests."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.kv_dtype = decoder, decoder.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: RaggedBatch, kv: KVCache, states: Tensor | None = None) -> Tensor:
        """Return logits fp32 [N, vocab], on the host; fill `states`, on the device."""
        flat, attention = lay_out(self._decoder, batch, kv)
        hidden = Hidden.allocate(len(flat.tokens), self._decoder)
        kept = () if states is None else (states,)
        cos_sin = self._decoder.cos_sin(int(batch.context_lens.max()))
        self._decoder.forward(flat, attention, cos_sin, hidden, *kept)
        rows = _int32_on(batch.logits_index.numpy(), self.device)
        out = torch.empty(len(rows), self.config.vocab_size, dtype=self.dtype, device=self.device)
        self._decoder.logits(hidden, rows, out)
        return out.float().cpu()


def lay_out(
    decoder: Any, batch: RaggedBatch, kv: KVCache, *, first_key: int = 0
) -> tuple[FlatTokens, PagedAttention]:
    """Return a batch's tokens on the decoder's device, and attention planned for them."""
    lens, device = batch.query_lens, decoder.device
    positions = batch.positions.numpy()
    owners = np.repeat(np.arange(len(lens)), lens)
    blocks = batch.block_tables[owners, positions // kv.block_size]
    slots = blocks * kv.block_size + positions % kv.block_size
    arrays = batch.tokens.numpy(), positions, slots
    flat = FlatTokens(*(_int32_on(each, device) for each in arrays))
    heads = heads_of(decoder.config)
    tuning = Tuning.of(heads, decoder.dtype, device, kv.block_size, decoder.dtype)
    tables, count = _int32_on(batch.block_tables, device), len(flat.tokens)
    attention = PagedAttention(decoder.config, kv, tables, count, tuning, first_key=first_key)
    contexts = _int32_on(batch.context_lens, device)
    attention.plan(_int32_on(np.cumsum([0, *lens]), device), contexts)
    return flat, attention


def _int32_on(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array, np.int32)).to(device)
