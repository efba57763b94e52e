"""Medusa heads (Cai et al. 2024, arXiv 2401.10774).

Head i predicts the token i + 2 positions after the target's last state, from that state alone. It
is a stack of blocks z + SiLU(W z + b) and an output matrix over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.rounded import RoundedProducts
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.drafting.heads.medusa import MedusaTensors, medusa_vocabulary
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights


class _Tensors(RoundedProducts, MedusaTensors[Linear]):
    pass


class MedusaHead(Head):
    """All Medusa heads of a file. Their drafts do not depend on each other."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        """`target_head` [vocab, hidden]: the target's output matrix, for a file without its own."""
        super().__init__(head, target)
        self.vocabulary = medusa_vocabulary(head, weights)
        self._norm = target.final_norm
        with torch.inference_mode():
            tensors = _Tensors(head, weights, target)
            self._blocks = [tensors.blocks(i) for i in range(head.num_heads)]
            self._heads = tensors.heads(self.vocabulary, target_head)
        products = [*self._heads, *(linear for blocks in self._blocks for linear in blocks)]
        self.matrix_bytes = sum(product.num_bytes for product in products)

    def fuse(self, hidden: Tensor) -> Tensor:
        size = self.config.hidden_size
        return F.rms_norm(hidden[:, 0], (size,), self._norm, self.head.eps)

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        return self.logits(self.fuse(hidden).roll(1, 0), [torch.arange(len(hidden))])[0]

    def logits(self, states: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of the first `len(rows)` heads. Those of head i are [N, vocab], for the
        N rows of `states` [R, H] whose indices are `rows[i]`."""
        refined = [self.refine(i, states[at]) for i, at in enumerate(rows)]
        if len(self._heads) == 1:
            logits = self._heads[0](torch.cat(refined)).split([len(at) for at in rows])
        else:
            logits = tuple(self._heads[i](z) for i, z in enumerate(refined))
        return [self.over_vocabulary(each) for each in logits]

    def refine(self, number: int, z: Tensor) -> Tensor:
        for linear in self._blocks[number]:
            z = z + F.silu(linear(z))
        return z
