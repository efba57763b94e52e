"""The base classes of draft heads, and of the builders of their layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import LayerBuilder, P
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.records import Norm


class Head:
    """A draft head. `config` has the head's sizes and the target's vocabulary size. `vocabulary`
    int64 [drafts] has the target's ids of the tokens that the head can draft; None: all.
    `matrix_bytes` is the size of its matrices."""

    lags = False  # see `SchedulerConfig.draft_lags`
    vocabulary: Tensor | None
    matrix_bytes: int

    def __init__(self, head: HeadConfig, target: Any) -> None:
        """`target` is a `Model` on a CPU, a `Decoder` on a GPU."""
        self.head, self.config = head, head.layer
        self.dtype, self.device, self.numerics = target.dtype, target.device, target.numerics

    def fuse(self, hidden: Tensor) -> Tensor:
        """Return the head's input, fp32 [T, hidden], from the target's states [T, layers, H]."""
        raise NotImplementedError

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        """Return the logits [T, vocab] of the first draft after each token. The batch is one whole
        sequence with the target's states `hidden`. Row 0 is meaningless: no state precedes it."""
        raise NotImplementedError

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Expand logits [N, drafts] to [N, vocab], with -inf for all other tokens."""
        if self.vocabulary is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.vocabulary, logits)


class HeadBuilder(LayerBuilder[P]):
    """Builds the layers of a head from its tensors, on its target's device. `quantised` says
    whether the target's weights are quantised."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Any, numerics: str = "invariant"
    ) -> None:
        super().__init__(head.layer, weights, target.dtype, target.device, numerics)
        self.head, self.weights, self.names = head, weights, weights.names
        self.quantised = target.matrix_bytes is not None

    def _norm_weight(self, place: str, norm: Norm) -> Tensor:
        """Return a norm's weight in fp32, without rounding it to the model's dtype first."""
        name = f"{place}.{norm.name}.weight".removeprefix("model.")
        weight = self.source.get(name, (self.config.hidden_size,)).float().to(self.device)
        return weight + norm.offset if norm.offset else weight
