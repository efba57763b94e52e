"""The one layer of an EAGLE head, over a ragged batch and paged KV of its own.

The head reads pairs: a token, and the state that the target (or, further ahead, the head itself)
had one position before. The pair stands at the token's position. So what is kept for a position
depends on the tokens up to it alone, as with any model: blocks can be shared as they are. Nobody
attends to position 0, before which there is no state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.cpu.compiled import CompiledProduct
from cbatch.runtime.cpu.compiled_head import CompiledHead, StateFusing
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder, StateReading
from cbatch.runtime.cpu.decoder import Model, RaggedBatch
from cbatch.runtime.cpu.head import Head, HeadBuilder
from cbatch.runtime.cpu.layers import Layer
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.kv_cache import KVCache


class EagleHead(Head):
    """A head with its weights, and what it borrows of its target. Its vocabulary ascends."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        """`target_head` [vocab, hidden] stands in where the file has no head of its own."""
        super().__init__(head, target)
        with torch.inference_mode():
            self._build(head, weights, target, target_head)

    def _build(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        c, own = head.layer, _Weights(head, weights, target)
        self.vocabulary = _vocabulary(head, weights)
        reads = len(head.hidden_layers) * target.config.hidden_size
        norms, fc = own.read_norms(target), own.fc(reads) if head.kind == "eagle3" else None
        if fc is None and target.config.hidden_size != c.hidden_size:
            sizes = f"{c.hidden_size}, the target's is {target.config.hidden_size}"
            raise ModelError(f"{weights.file}: hidden_size: {sizes}; use a head of this model")
        layer, reading = own.layer()
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
        """Logits [N, vocab] of the wanted rows, -inf where it drafts nothing, and what it carries
        on from them, [N, hidden]."""
        logits, carried = self.choices(batch, kv, states)
        return self.over_vocabulary(logits), carried

    def choices(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, with the logits [N, drafts] of what it drafts alone."""
        carried = torch.empty(len(batch.logits_index), 1, self.config.hidden_size)
        lens, wanted = (batch.query_lens, batch.context_lens), batch.logits_index
        logits = self._decoder.run(
            batch.tokens,
            *lens,
            batch.block_tables,
            wanted,
            kv,
            None,
            states=states.contiguous(),
            hidden=carried,
        )
        carried = carried[:, 0]
        if self.head.norm_output:
            carried = F.rms_norm(carried, carried.shape[-1:], self._norm, self.config.rms_norm_eps)
        return logits, carried


class _Weights(HeadBuilder):
    def layer(self) -> tuple[Layer, StateReading]:
        c, eagle3 = self.config, self.head.kind == "eagle3"
        hidden, inner, width = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        wide = 2 * hidden if eagle3 else hidden
        norm = self._norm("layers.0.post_attention_layernorm")
        layer = Layer(
            window=None,
            qkv=self._projected(attention, "qkv", wide),
            qk_weight=self._qk_weight(attention) if c.qk_norm else None,
            out=self._below([f"{attention}.o_proj.weight"], (hidden, width), None, None),
            gate_up=self._below(
                [f"{mlp}.{half}_proj.weight" for half in ("gate", "up")],
                (inner, hidden),
                None,
                norm,
            ),
            down=self._below([f"{mlp}.down_proj.weight"], (hidden, inner), None, None),
        )
        if not eagle3:
            front = self.fc(2 * hidden)
            return layer, StateReading(front, None, None, None, plain_in=True, plain_out=True)
        reading = StateReading(
            front=None,
            only_kv=self._projected(attention, "kv", wide),
            token_norm=self._norm("layers.0.input_layernorm"),
            state_norm=self._norm("layers.0.hidden_norm"),
            normed_residual=self.head.norm_before_residual,
        )
        return layer, reading

    def fc(self, reads: int) -> Linear:
        size = self.config.hidden_size
        bias = self._get("fc.bias", size) if self.head.fc_bias else None
        return self._below(["fc.weight"], (size, reads), bias, None)

    def lm_head(self, vocabulary: Tensor | None, target_head: Tensor) -> Linear:
        hidden, name = self.config.hidden_size, "lm_head.weight"
        if name in self.names or target_head.shape[1] != hidden:
            rows = self._get(name, self.head.draft_vocab_size, hidden)
        else:
            rows = (target_head if vocabulary is None else target_head[vocabulary]).to(self.dtype)
        norm = self._norm("norm") if self.head.kind == "eagle3" else None
        return self._linear(rows.contiguous(), None, norm)

    def embedding(self, target: Model) -> Tensor | CompiledProduct:
        c = self.config
        if target.config.hidden_size == c.hidden_size:
            return target.embedding
        return self._get("embed_tokens.weight", c.vocab_size, c.hidden_size)

    def read_norms(self, target: Model) -> Tensor | None:
        """Before fc: [layers, H], or of all together [layers * H]; of EAGLE-1 the model's last."""
        count, size = len(self.head.hidden_layers), target.config.hidden_size
        if self.head.kind == "eagle":
            return target.final_norm
        if self.head.input_norm:
            return self.source.get("input_norm.weight", (count * size,)).float()
        if not self.head.fc_norm:
            return None
        each = [self.source.get(f"fc_norm.{i}.weight", (size,)) for i in range(count)]
        return torch.stack(each).float()

    def _projected(self, attention: str, letters: str, columns: int) -> Linear:
        weight = self._heads(attention, letters, "weight", columns)
        bias = self._heads(attention, letters, "bias") if self.config.attention_bias else None
        return self._linear(weight, bias, None)

    def _norm(self, module: str) -> Tensor:
        """Not rounded to what products have: a head may keep its norms in fp32."""
        size = self.config.hidden_size
        return self.source.get(f"{module}.weight", (size,)).float() * size**0.5


def _vocabulary(head: HeadConfig, weights: HeadWeights) -> Tensor | None:
    """Ids of the target, from the offsets `d2t`. Raises ModelError where they are none."""
    count, vocab = head.draft_vocab_size, head.layer.vocab_size
    if count == vocab:
        return None
    ids = weights.read("d2t", (count,)).long() + torch.arange(count)
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        problem = f"tensor d2t gives ids that are not ascending within the vocabulary of {vocab}"
        raise ModelError(f"{weights.file}: {problem}; use a head that was trained for this model")
    return ids
