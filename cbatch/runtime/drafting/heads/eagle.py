"""The tensors of EAGLE heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.drafting.heads.head import HeadBuilder
from cbatch.runtime.layers import Layer, P
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.records import Attention

_ATTENTION = "layers.0.self_attn"


class EagleTensors(HeadBuilder[P]):
    """Builder of an EAGLE head's parts."""

    def layer(self) -> Layer[P]:
        return self._layer("layers.0", self.config.layers[0])

    def pair_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of token and state."""
        pair = self.config.input
        assert pair is not None
        place = "layers.0" if self.head.kind == "eagle3" else "model"
        return self._norm(place, pair.token_norm), self._norm(place, pair.state_norm)

    def input_layer(self) -> P | None:
        """Return EAGLE-1's linear layer from (embedding, state) to one state; None for EAGLE-3."""
        return None if self.head.kind == "eagle3" else self._fc(2 * self.config.hidden_size)

    def state_fusing_layer(self, target: Any) -> P | None:
        """Return the EAGLE-3 linear layer that fuses the states of several target layers; None for
        EAGLE-1. Raises ModelError for an EAGLE-1 head whose hidden size is not the target's."""
        size, width = self.config.hidden_size, target.config.hidden_size
        if self.head.kind == "eagle3":
            return self._fc(len(self.head.hidden_layers) * width)
        if width != size:
            sizes = f"{size}, the target's is {width}"
            raise ModelError(f"{self.weights.file}: hidden_size: {sizes}; use a head of this model")
        return None

    def _fc(self, reads: int) -> P:
        size = self.config.hidden_size
        bias = self._get("fc.bias", size) if self.head.fc_bias else None
        return self._product(["fc.weight"], (size, reads), bias, None)

    def lm_head(self, vocabulary: Tensor | None, target_head: Tensor) -> P:
        hidden, name = self.config.hidden_size, "lm_head.weight"
        if name in self.names or target_head.shape[1] != hidden:
            rows = self._get(name, self.head.draft_vocab_size, hidden)
        else:
            rows = target_head if vocabulary is None else target_head[vocabulary]
        norm = self._norm("model", self.config.norm)
        return self._linear(rows.to(self.device, self.dtype).contiguous(), None, norm)

    def embedding(self, target: Any) -> Any:
        c = self.config
        if target.config.hidden_size == c.hidden_size:
            return target.embedding
        return self._get("embed_tokens.weight", c.vocab_size, c.hidden_size)

    def read_norms(self, target: Any) -> Tensor | None:
        """Return the weight of the norm before fc: one per layer [layers, H], or one for all
        [layers * H]. For EAGLE-1 it is the target's final norm."""
        count, size = len(self.head.hidden_layers), target.config.hidden_size
        if self.head.kind != "eagle3":
            return target.final_norm
        if self.head.input_norm:
            return self.source.get("input_norm.weight", (count * size,)).float().to(self.device)
        if not self.head.fc_norm:
            return None
        norms = [self.source.get(f"fc_norm.{i}.weight", (size,)) for i in range(count)]
        return torch.stack(norms).float().to(self.device)

    def _qkv(
        self, attention: str, m: Attention, norm: Tensor | None, shift: Tensor | None = None
    ) -> P:
        return self.projected("qkv", norm)

    def projected(self, letters: str, norm: Tensor | None = None) -> P:
        """Return the attention projections `letters` ("qkv" or "kv") as one linear layer, which
        has the weight of the norm before it."""
        m, columns = self.config.attention, self.config.hidden_size
        if self.head.kind == "eagle3":
            columns *= 2
        weight = self._heads(_ATTENTION, m, letters, "weight", columns)
        bias = self._heads(_ATTENTION, m, letters, "bias") if m.bias else None
        return self._linear(weight, bias, norm)


def eagle_vocabulary(head: HeadConfig, weights: HeadWeights) -> Tensor | None:
    """Return the target's ids of the tokens that the head can draft, from the tensor d2t, which has
    their offsets; None: all tokens. Raises ModelError for ids that do not ascend or are out of
    range.
    """
    count, vocab = head.draft_vocab_size, head.layer.vocab_size
    if count == vocab:
        return None
    ids = weights.read("d2t", (count,)).long() + torch.arange(count)
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        problem = f"tensor d2t gives ids that are not ascending within the vocabulary of {vocab}"
        raise ModelError(f"{weights.file}: {problem}; use a head that was trained for this model")
    return ids
