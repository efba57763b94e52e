"""The tensors of Medusa heads."""

from __future__ import annotations

from torch import Tensor

from cbatch.runtime.drafting.heads.head import HeadBuilder
from cbatch.runtime.layers import P
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights


class MedusaTensors(HeadBuilder[P]):
    """Builder of the Medusa heads' parts."""

    def blocks(self, number: int) -> list[P]:
        return [self._block(f"blocks.{number}.layers.{i}") for i in range(self.head.num_blocks)]

    def _block(self, name: str) -> P:
        size, biased = self.config.hidden_size, f"{name}.bias" in self.names
        bias = self._get(f"{name}.bias", size) if biased else None
        return self._product([f"{name}.weight"], (size, size), bias, None)

    def heads(self, vocabulary: Tensor | None, target_head: Tensor) -> list[P]:
        """Return one output matrix per head, or one for all: from the file, else the target's."""
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
