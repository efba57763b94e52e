"""Base of draft heads (EAGLE, Medusa), which read the target's hidden states, on a CPU or a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled import Blocks, CompiledProduct, Run
from cbatch.runtime.cpu.layers import LayerBuilder
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.cpu.numerics import Numerics
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.gguf_blocks import rounded_to_q8_0
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights

_BLOCK = 32  # columns of a Q8_0 block


class Head:
    """A draft head. `config` has its layers' sizes and the target's vocabulary size. `vocabulary`
    int64 [drafts] has the target's ids of the tokens that the head can draft; None: all.
    `block_bytes` is the size of its matrices."""

    vocabulary: Tensor | None
    block_bytes: int

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
        """Expand logits [N, drafts] to [N, vocab], with -inf for tokens that it cannot draft."""
        if self.vocabulary is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.vocabulary, logits)


class HeadBuilder(LayerBuilder):
    """Builds the linear layers of a head from its tensors, on its target's device.

    If the target has block-quantised weights, a head on a CPU is rounded to Q8_0, which halves the
    memory that a draft reads. Drafts are verified, so the head need not be exact.
    """

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Any, numerics: str = "invariant"
    ) -> None:
        mode = Numerics(numerics, may_pack=False)
        super().__init__(head.layer, weights, target.dtype, target.device, mode)
        self.head, self.weights, self.names = head, weights, weights.names
        self._rounds = target.block_bytes is not None

    def _norm_weight(self, module: str) -> Tensor:
        """Return a norm's weight in fp32, without rounding it to the model's dtype first."""
        weight = self.source.get(f"{module}.weight", (self.config.hidden_size,))
        return weight.float().to(self.device)

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        out, columns = weight.shape
        if not self._rounds or columns % _BLOCK:
            return super()._linear(weight, bias, in_scale)
        blocks = Blocks("Q8_0", columns, rounded_to_q8_0(weight))
        return Linear.of(CompiledProduct.of_blocks([(blocks, Run(out, out, 0))], bias, in_scale))
