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
from cbatch.runtime.cpu.head import Head, HeadBuilder
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights


class MedusaHead(Head):
    """All Medusa heads of a file. Their drafts do not depend on each other."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        """`target_head` [vocab, hidden]: the target's output matrix, for files without one."""
        super().__init__(head, target)
        self.vocabulary = medusa_vocabulary(head, weights)
        self._norm = target.final_norm
        with torch.inference_mode():
            own = MedusaTensors(head, weights, target)
            self._blocks = [own.blocks(i) for i in range(head.num_heads)]
            self._heads = own.heads(self.vocabulary, target_head)
        products = [*self._heads, *(linear for blocks in self._blocks for linear in blocks)]
        size = self.dtype.itemsize
        self.block_bytes = sum(
            p.shape[0] * p.shape[1] * size if p.compiled is None else p.compiled.num_bytes
            for p in products
        )

    def fuse(self, hidden: Tensor) -> Tensor:
        size = self.config.hidden_size
        return F.rms_norm(hidden[:, 0], (size,), self._norm, self.config.rms_norm_eps)

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        return self.logits(self.fuse(hidden).roll(1, 0), [torch.arange(len(hidden))])[0]

    def logits(self, states: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of the first `len(rows)` heads. Those of head i are [N, vocab], for the
        N rows of `states` [R, H] whose indices are `rows[i]`."""
        refined = [self._refine(i, states[at]) for i, at in enumerate(rows)]
        if len(self._heads) == 1:
            logits = self._heads[0](torch.cat(refined)).split([len(at) for at in rows])
        else:
            logits = tuple(self._heads[i](z) for i, z in enumerate(refined))
        return [self.over_vocabulary(each) for each in logits]

    def _refine(self, number: int, z: Tensor) -> Tensor:
        for linear in self._blocks[number]:
            z = z + F.silu(linear(z))
        return z


class MedusaTensors(HeadBuilder):
    """Builder of the Medusa heads' parts."""

    def blocks(self, number: int) -> list[Linear]:
        return [self._block(f"blocks.{number}.layers.{i}") for i in range(self.head.num_blocks)]

    def _block(self, name: str) -> Linear:
        size, biased = self.config.hidden_size, f"{name}.bias" in self.names
        bias = self._get(f"{name}.bias", size) if biased else None
        return self._below([f"{name}.weight"], (size, size), bias, None)

    def heads(self, vocabulary: Tensor | None, target_head: Tensor) -> list[Linear]:
        """Return an output matrix per head, or one for all: the file's, else the target's."""
        if "lm_heads.0.weight" in self.names and not self.head.shares_head:
            names = [f"lm_heads.{i}.weight" for i in range(self.head.num_heads)]
        else:
            names = [name for name in ("lm_head.weight", "lm_heads.0.weight") if name in self.names]
        rows = [self._rows(name, vocabulary) for name in names]
        if not rows:
            rows = [target_head if vocabulary is None else target_head[vocabulary]]
        rows = [each.to(self.device, self.dtype).contiguous() for each in rows]
        return [self._linear(each, None, None) for each in rows]

    def _rows(self, name: str, vocabulary: Tensor | None) -> Tensor:
        """Return the rows of an output matrix for the tokens that the heads can draft. The file has
        only these rows, or those of the whole vocabulary."""
        c, count = self.config, self.head.draft_vocab_size
        whole = self.weights.shape_of(name) == (c.vocab_size, c.hidden_size)
        rows = self._get(name, c.vocab_size if whole else count, c.hidden_size)
        return rows[vocabulary] if whole and vocabulary is not None else rows


def medusa_vocabulary(head: HeadConfig, weights: HeadWeights) -> Tensor | None:
    """Return the target's ids of the tokens that the heads can draft, from the tensor token_map;
    None: all tokens. Raises ModelError for ids that repeat or are out of range."""
    count, vocab = head.draft_vocab_size, head.layer.vocab_size
    if count == vocab:
        return None
    ids = weights.read("token_map", (count,)).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < count:
        problem = f"tensor token_map gives ids twice, or outside of the vocabulary of {vocab}"
        raise ModelError(f"{weights.file}: {problem}; use a head that was trained for this model")
    return ids
