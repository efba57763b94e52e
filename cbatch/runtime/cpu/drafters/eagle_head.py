"""An EAGLE head: one transformer layer over a ragged batch, with a paged KV cache of its own.

The head's input at a position is the token there and the hidden state of the previous position.
That state is the target's, or for later drafts the head's own. So K and V of a position depend only
on the tokens up to it, and prefix blocks can be shared as with any model. Position 0 has no
previous state; no query attends to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder, StateReading
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.compiled_head import CompiledHead, StateFusing
from cbatch.runtime.cpu.head import Head, HeadBuilder
from cbatch.runtime.cpu.layers import Layer
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights

_ATTENTION = "layers.0.self_attn"


class EagleHead(Head):
    """An EAGLE head; it may share weights with the target. The ids of `vocabulary` ascend."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        """`target_head` [vocab, hidden]: the target's output matrix, for a head without its own."""
        super().__init__(head, target)
        with torch.inference_mode():
            self._build(head, weights, target, target_head)

    def _build(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        c, own = head.layer, EagleTensors(head, weights, target)
        self.vocabulary = eagle_vocabulary(head, weights)
        norms, fc = own.read_norms(target), own.fusing(target)
        layer, front = own.layer(), own.front()
        reading = StateReading(front, None, None, None, plain_in=True, plain_out=True)
        if front is None:
            reading = StateReading(
                front=None,
                only_kv=own.projected("kv"),
                token_norm=own.norm("layers.0.input_layernorm"),
                state_norm=own.norm("layers.0.hidden_norm"),
                normed_residual=head.norm_before_residual,
            )
        lm_head = own.lm_head(self.vocabulary, target_head)
        embedding = own.embedding(target)
        products = [p for p in (*layer.products(), lm_head, fc, *reading[:2]) if p]
        if any(linear.compiled is None for linear in products):
            raise ModelError("draft: heads need the project's kernels: install a C compiler (gcc)")
        self._decoder = CompiledDecoder(c, embedding, [layer], lm_head, reading)
        size = (c.hidden_size,)
        self._norm = weights.get("norm.weight", size).float() if head.norm_output else None
        self.block_bytes = sum(p.compiled.num_bytes for p in products if p.compiled is not None)
        width = target.config.hidden_size
        self.compiled = CompiledHead(
            self._decoder,
            StateFusing(len(head.hidden_layers), width, fc, norms, head.input_norm),
            self.vocabulary,
            carries_normed=head.norm_output,
            carry_norm=self._norm,
        )

    def fuse(self, hidden: Tensor) -> Tensor:
        return self.compiled.fuse(hidden)

    def first_logits(self, batch: RaggedBatch, kv: KVCache, hidden: Tensor) -> Tensor:
        return self.forward(batch, kv, self.fuse(hidden).roll(1, 0))[0]

    def forward(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, vocab] of the rows `batch.logits_index`, -inf for tokens that the
        head cannot draft, and the states [N, hidden] that the next drafts continue from."""
        logits, carried = self.choices(batch, kv, states)
        return self.over_vocabulary(logits), carried

    def choices(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `forward`, but the logits [N, drafts] only of `vocabulary`."""
        carried = torch.empty(len(batch.logits_index), 1, self.config.hidden_size)
        logits = self._decoder.run(
            batch.tokens,
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.logits_index,
            kv,
            None,
            states=states.contiguous(),
            hidden=carried,
        )
        carried = carried[:, 0]
        if self.head.norm_output:
            carried = F.rms_norm(carried, carried.shape[-1:], self._norm, self.config.rms_norm_eps)
        return logits, carried


class EagleTensors(HeadBuilder):
    """Builder of an EAGLE head's parts."""

    def layer(self) -> Layer:
        c, mlp = self.config, "layers.0.mlp"
        hidden, inner, width = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
        norm = self._norm("layers.0.post_attention_layernorm")
        return Layer(
            window=None,
            qkv=self.projected("qkv"),
            qk_weight=self._qk_weight(_ATTENTION) if c.qk_norm else None,
            out=self._below([f"{_ATTENTION}.o_proj.weight"], (hidden, width), None, None),
            gate_up=self._below(
                [f"{mlp}.{half}_proj.weight" for half in ("gate", "up")],
                (inner, hidden),
                None,
                norm,
            ),
            down=self._below([f"{mlp}.down_proj.weight"], (hidden, inner), None, None),
        )

    def norm(self, module: str) -> Tensor:
        return self._norm(module)

    def front(self) -> Linear | None:
        """Return EAGLE-1's linear layer from (embedding, state) to one state; None for EAGLE-3."""
        return None if self.head.kind == "eagle3" else self._fc(2 * self.config.hidden_size)

    def fusing(self, target: Any) -> Linear | None:
        """Return the EAGLE-3 linear layer that fuses the states of several target layers; None for
        EAGLE-1. Raises ModelError for an EAGLE-1 head whose hidden size is not the target's."""
        size, width = self.config.hidden_size, target.config.hidden_size
        if self.head.kind == "eagle3":
            return self._fc(len(self.head.hidden_layers) * width)
        if width != size:
            sizes = f"{size}, the target's is {width}"
            raise ModelError(f"{self.weights.file}: hidden_size: {sizes}; use a head of this model")
        return None

    def _fc(self, reads: int) -> Linear:
        size = self.config.hidden_size
        bias = self._get("fc.bias", size) if self.head.fc_bias else None
        return self._below(["fc.weight"], (size, reads), bias, None)

    def lm_head(self, vocabulary: Tensor | None, target_head: Tensor) -> Linear:
        hidden, name = self.config.hidden_size, "lm_head.weight"
        if name in self.names or target_head.shape[1] != hidden:
            rows = self._get(name, self.head.draft_vocab_size, hidden)
        else:
            rows = target_head if vocabulary is None else target_head[vocabulary]
        norm = self._norm("norm") if self.head.kind == "eagle3" else None
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
        if self.head.kind == "eagle":
            return target.final_norm
        if self.head.input_norm:
            return self.source.get("input_norm.weight", (count * size,)).float().to(self.device)
        if not self.head.fc_norm:
            return None
        norms = [self.source.get(f"fc_norm.{i}.weight", (size,)) for i in range(count)]
        return torch.stack(norms).float().to(self.device)

    def projected(self, letters: str) -> Linear:
        """Return the attention projections `letters` ("qkv" or "kv") as one linear layer."""
        columns = self.config.hidden_size * (2 if self.head.kind == "eagle3" else 1)
        weight = self._heads(_ATTENTION, letters, "weight", columns)
        bias = self._heads(_ATTENTION, letters, "bias") if self.config.attention_bias else None
        return self._linear(weight, bias, None)


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
