"""One decoder for every supported family, over a ragged batch and paged KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled import compiles
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder
from cbatch.runtime.cpu.layers import CpuLayerBuilder
from cbatch.runtime.cpu.linear import Linear, resolve_numerics
from cbatch.runtime.cpu.torch_pass import TorchPass
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.checkpoint import open_checkpoint, warn_unread
from cbatch.runtime.model.config import ModelConfig, ModelError
from cbatch.runtime.model.shapes import head_rows
from cbatch.runtime.model.sharding import ShardedWeights, shard_config
from cbatch.runtime.model.weight_files import WeightSource
from cbatch.runtime.rank_group import RankGroup


class Model:
    """A decoder with its weights. Not reentrant: one forward pass at a time.

    A pass counts up `progress`, int64 [1], at least once per layer, for a watching thread. None: no
    thread watches.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        numerics: str,
        ranks: RankGroup | None = None,
    ) -> None:
        """Load the weights. With `ranks`, config and source are this rank's (see `sharding`), and
        all ranks must make the same passes."""
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self.ranks = ranks
        self.numerics = numerics
        self.progress: NDArray[np.int64] | None = None
        self.hidden_layers: tuple[int, ...] = ()
        with torch.inference_mode():
            logits = None if ranks is None else head_rows(config, ranks.size)
            builder = CpuLayerBuilder(config, source, dtype, self.device, numerics, logits)
            self.embedding, self.layers, self.head = builder.build()
            self.final_norm = builder.final_norm()
            inputs = config.layer_inputs
            self.inputs = None if inputs is None else builder.layer_inputs(inputs)
        self.compiled = builder.compiled
        run_layers = CompiledDecoder if self.compiled else TorchPass
        parts = config, self.embedding, self.layers, self.head
        self._pass: CompiledDecoder | TorchPass = run_layers(
            *parts, ranks=ranks, inputs=self.inputs
        )

    @property
    def code(self) -> str:
        """A description of the modelling code in use."""
        return f"our own ({self.config.family})"

    @property
    def matrix_bytes(self) -> int | None:
        """Bytes of all matrices, if some of them are quantised; None: they follow from `dtype`."""
        products = [linear.compiled for linear in self.linears()]
        compiled = [product for product in products if product is not None]
        if not any(product.block_types for product in compiled):
            return None
        tables = [] if self.inputs is None else [self.inputs.table]
        sizes = (t.nbytes if isinstance(t, Tensor) else t.num_bytes for t in tables)
        return sum(product.num_bytes for product in compiled) + sum(sizes)

    def linears(self) -> Iterator[Linear]:
        """Yield every product of a pass."""
        for layer in self.layers:
            yield from layer.products()
        if self.inputs is not None:
            yield self.inputs.projection
        yield self.head

    def keep_hidden(self, layers: tuple[int, ...]) -> None:
        """Let passes return the residual stream of all rows before these layers, in this order.
        Number `num_layers` means the output of the last layer, before the final norm."""
        self.hidden_layers = layers
        self._pass.keep(layers)

    def allocate_hidden(self, num_rows: int) -> Tensor | None:
        """Return memory for the hidden states of `num_rows` rows; None if none are kept."""
        if not self.hidden_layers:
            return None
        return torch.empty(num_rows, len(self.hidden_layers), self.config.hidden_size)

    def forward(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor | None = None) -> Tensor:
        """Compute logits, fp32 [N, vocab], of the rows `batch.logits_index`.

        Writes K and V of all T tokens, then attends. The caller owns the result. Kept states
        (`keep_hidden`) are written to `hidden`, fp32 [T, layers, hidden_size].
        """
        if torch.is_inference_mode_enabled():
            return self._forward(batch, kv, hidden)
        with torch.inference_mode():
            return self._forward(batch, kv, hidden)

    def _forward(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor | None) -> Tensor:
        context = int(batch.context_lens.max())
        if context > self.config.max_position_tokens:
            raise ValueError(
                f"context_lens: {context} tokens exceed the model's context of "
                f"{self.config.max_position_tokens}"
            )
        return self._pass.run(
            batch.tokens,
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.logits_index,
            kv,
            self.progress,
            hidden=hidden,
            state_tables=batch.state_tables,
            state_slots=batch.state_slots,
        )


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    numerics: str = "auto",
    random_weights_seed: int | None = None,
    ranks: RankGroup | None = None,
) -> Model:
    """Load a model from a directory, GGUF file or hub name (see `open_checkpoint`). With
    several `ranks`, load this rank's shard."""
    if numerics not in ("auto", "invariant", "fast"):
        raise ModelError(f"numerics: must be auto, invariant or fast, got {numerics!r}")
    config, weights, served = open_checkpoint(path_or_name, dtype, random_weights_seed)
    source = weights
    if ranks is not None:
        source = ShardedWeights(source, config, ranks.rank, ranks.size)
        config = shard_config(config, ranks.size)
    mode = resolve_numerics(numerics, served, compiled=compiles(served))
    model = Model(config, source, served, mode, ranks)
    if ranks is None or not ranks.rank:
        warn_unread(path_or_name, weights.unread())
    return model
