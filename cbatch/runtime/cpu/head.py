"""What heads that read a model's states have in common, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.cpu.compiled import Blocks, CompiledProduct, Run
from cbatch.runtime.cpu.decoder import RaggedBatch
from cbatch.runtime.cpu.layers import LayerBuilder
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.cpu.numerics import Numerics
from cbatch.runtime.model.gguf_blocks import rounded_to_q8_0
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.kv_cache import KVCache

_BLOCK = 32  # columns


class Head:
    """`config` is the shape of its layers, with the target's vocabulary. `vocabulary` int64
    [drafts] are the target's ids of what it may draft; None: all. `block_bytes`: of its
    matrices."""

    vocabulary: Tensor | None
    block_bytes: int

    def __init__(self, head: HeadConfig, target: Any) -> None:
        """`target` is a `Model`, or on a GPU a `Decoder`."""
        self.head, self.config = head, head.layer
        self.dtype, self.device, self.numerics = target.dtype, target.device, target.numerics

    def fuse(self, hidden: Tensor) -> Tensor:
        """What it reads of a position, fp32 [T, hidden], of the target's states [T, layers, H]."""
        raise NotImplementedError

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        """Of the first draft behind each token of a sequence, [T, vocab], which is all of the batch
        and has these states. That of token 0, before which there is no state, says nothing."""
        raise NotImplementedError

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """[N, drafts] to [N, vocab], -inf where it drafts nothing."""
        if self.vocabulary is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.vocabulary, logits)


class HeadBuilder(LayerBuilder):
    """Build the products of a head from its tensors, on its target's device.

    On a CPU, beside a target of block weights, they are rounded to Q8_0, so that a draft reads half
    as much; what a head guesses with need not be exact.
    """

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Any, numerics: str = "invariant"
    ) -> None:
        mode = Numerics(numerics, may_pack=False)
        super().__init__(head.layer, weights, target.dtype, target.device, mode)
        self.head, self.weights, self.names = head, weights, weights.names
        self._rounds = target.block_bytes is not None

    def _norm_weight(self, module: str) -> Tensor:
        """Return it as it is stored: a head may keep its norms in fp32."""
        weight = self.source.get(f"{module}.weight", (self.config.hidden_size,))
        return weight.float().to(self.device)

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        out, columns = weight.shape
        if not self._rounds or columns % _BLOCK:
            return super()._linear(weight, bias, in_scale)
        blocks = Blocks("Q8_0", columns, rounded_to_q8_0(weight))
        return Linear.of(CompiledProduct.of_blocks([(blocks, Run(out, out, 0))], bias, in_scale))
