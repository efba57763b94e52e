"""A transformers model with the interface of our own `Model`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.core.request.errors import FieldError
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled import compiles
from cbatch.runtime.compiled.threads import single_torch_thread
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.cpu.transformers_backend import experts
from cbatch.runtime.cpu.transformers_backend.attention import CpuAttention
from cbatch.runtime.cpu.transformers_backend.products import Products, widen
from cbatch.runtime.cpu.transformers_backend.sharing import RankShard
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.rank_group import RankGroup
from cbatch.runtime.transformers_backend import attention
from cbatch.runtime.transformers_backend.config import bridge
from cbatch.runtime.transformers_backend.step import Pass


class TransformersModel:
    """A model that transformers' modelling code computes, over a ragged batch and a paged KV cache.
    It has the interface of `decoder.Model`.

    Weights have the dtype `dtype`; activations between layers are fp32.
    """

    hidden_layers: tuple[int, ...] = ()
    kv_dtype = torch.float32  # type of the self-test's KV cache

    def __init__(
        self,
        net: nn.Module,
        path: Path,
        dtype: torch.dtype,
        numerics: str,
        ranks: RankGroup | None = None,
    ) -> None:
        """Replace the attention and products of `net`, a causal language model, by ours.

        With `ranks`, `net` is the whole model on every rank; this object keeps the rank's shard.
        Raises ModelError for a model that we cannot compute, and FieldError for a model that cannot
        be divided among the ranks."""
        self.ranks = ranks
        self.dtype, self.device, self.numerics = dtype, torch.device("cpu"), numerics
        self.net, self.path = net, path
        self._pass = Pass()
        attention.register()
        experts.register()
        with torch.no_grad():
            shard = None if ranks is None else RankShard(net, ranks)
            self._experts = [each for each in net.modules() if experts.pack_experts(each)]
            self._products = Products(compiles(dtype))
            self._products.replace(net)
            widen(net)
            if shard is not None:
                shard.complete(net)
        net.set_attn_implementation(attention.NAME)
        if self._experts:
            net.set_experts_implementation(experts.NAME)
        self._selects_rows = "logits_to_keep" in inspect.signature(net.forward).parameters
        row = torch.zeros(1, dtype=torch.int64)
        layers, vocab_size = attention.probe(
            self.path, net, self._pass, lambda: self._run(row, row, row)
        )
        self._attention = CpuAttention(layers)
        self.config = bridge(net.config, path, layers, vocab_size)

    @property
    def code(self) -> str:
        """A description of the modelling code in use."""
        from transformers import __version__

        name = type(self.net).__name__
        return f"transformers {__version__} ({name}), with our attention and products"

    @property
    def progress(self) -> NDArray[np.int64] | None:
        return self._pass.progress

    @progress.setter
    def progress(self, counter: NDArray[np.int64] | None) -> None:
        self._pass.progress = counter

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all weights in memory."""
        size = sum(linear.num_bytes for linear in self.linears())
        size += sum(experts.num_bytes(each) for each in self._experts)
        return size + sum(p.nbytes for p in self.net.parameters())

    def linears(self) -> Iterator[Linear]:
        yield from self._products.linears()

    def keep_hidden(self, layers: tuple[int, ...]) -> None:
        if layers:
            raise FieldError(
                "draft",
                "heads read hidden states that transformers' modelling code does not return",
                "give a draft model, or drafter ngram or suffix",
            )

    def allocate_hidden(self, num_rows: int) -> None:
        """Return None: no hidden states are kept."""
        return None

    def forward(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor | None = None) -> Tensor:
        """Compute logits as `Model.forward` does. Hidden states are not written."""
        last = int(batch.context_lens.max())
        if last > self.config.max_position_tokens:
            raise ValueError(
                f"context_lens: {last} tokens exceed the model's context of "
                f"{self.config.max_position_tokens}"
            )
        attending = self._attention.begin(self._pass, batch, kv)
        with torch.inference_mode(), single_torch_thread(), attending:
            return self._run(batch.tokens, batch.positions, batch.logits_index)

    def _run(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        selection = {"logits_to_keep": logit_rows} if self._selects_rows else {}
        out = self.net(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, **selection
        )
        logits = out.logits[0]
        return (logits if self._selects_rows else logits.index_select(0, logit_rows)).float()
