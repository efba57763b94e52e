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
from cbatch.runtime.cpu.compiled_pass import CompiledDecoder, StateReading
from cbatch.runtime.cpu.decoder import Model, RaggedBatch
from cbatch.runtime.cpu.layers import Layer
from cbatch.runtime.cpu.linear import Linear, make_plan
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import HeadConfig
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.kv_cache import KVCache
from cbatch.runtime.model.rope import RotaryTable, interleave_halves


class EagleHead:
    """A head with its weights, and what it borrows of its target. `vocabulary` int64 [drafts] are
    the target's ids of what it may draft, ascending; None: all."""

    def __init__(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        """`target_head` [vocab, hidden] stands in where the file has no head of its own."""
        self.head, self.config = head, head.layer
        self.dtype, self.device, self.numerics = target.dtype, target.device, target.numerics
        with torch.inference_mode():
            self._build(head, weights, target, target_head)

    def _build(
        self, head: HeadConfig, weights: HeadWeights, target: Model, target_head: Tensor
    ) -> None:
        c, own = head.layer, _Weights(head, weights, self.dtype)
        self.vocabulary = _vocabulary(head, weights)
        reads = len(head.hidden_layers) * target.config.hidden_size
        self._norms = own.read_norms(target)
        self._fc = own.fc(reads) if head.kind == "eagle3" else None
        if self._fc is None and target.config.hidden_size != c.hidden_size:
            sizes = f"{c.hidden_size}, the target's is {target.config.hidden_size}"
            raise ModelError(f"{weights.file}: hidden_size: {sizes}; use a head of this model")
        layer, reading = own.layer()
        lm_head = own.lm_head(self.vocabulary, target_head)
        embedding = own.embedding(target)
        products = [p for p in (*layer.products(), lm_head, *reading[:2]) if p is not None]
        if any(linear.compiled is None for linear in products):
            raise ModelError("draft: heads need the project's kernels: install a C compiler (gcc)")
        rotary = RotaryTable(c.rope, c.head_dim, c.num_kv_heads, c.group_size, self.device)
        self._decoder = CompiledDecoder(c, embedding, [layer], lm_head, rotary, reading)
        self._norm = weights.get("norm.weight", c.hidden_size).float() if head.norm_output else None
        self.block_bytes = sum(p.compiled.num_bytes for p in products if p.compiled is not None)
        if self._fc is not None and self._fc.compiled is not None:
            self.block_bytes += self._fc.compiled.num_bytes

    def fuse(self, hidden: Tensor) -> Tensor:
        """What it reads of a position, fp32 [T, hidden], of the target's states [T, layers, H]."""
        eps = self.config.rms_norm_eps
        if self._norms is not None:
            shape = self._norms.shape[-1:]
            wide = hidden.flatten(1) if self.head.input_norm else hidden
            hidden = F.rms_norm(wide, shape, eps=eps) * self._norms
        if self._fc is None:
            return hidden.flatten(1)
        return self._fc(hidden.flatten(1).contiguous())

    def ingest(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> None:
        """K and V of the batch's tokens, each with the state before it, [T, hidden]."""
        self._run(batch, kv, states)

    def forward(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, vocab] of the wanted rows, -inf where it drafts nothing, and what it carries
        on from them, [N, hidden]."""
        logits, carried = self._run(batch, kv, states)
        if self.head.norm_output:
            carried = F.rms_norm(carried, carried.shape[-1:], self._norm, self.config.rms_norm_eps)
        if self.vocabulary is None:
            return logits, carried
        whole = torch.full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.vocabulary, logits), carried

    def _run(self, batch: RaggedBatch, kv: KVCache, states: Tensor) -> tuple[Tensor, Tensor]:
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
        return logits, carried[:, 0]


class _Weights:
    """The tensors of a head as products."""

    def __init__(self, head: HeadConfig, weights: HeadWeights, dtype: torch.dtype) -> None:
        self.head, self.config, self.weights, self.dtype = head, head.layer, weights, dtype

    def layer(self) -> tuple[Layer, StateReading]:
        c, eagle3 = self.config, self.head.kind == "eagle3"
        hidden, inner, width = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
        wide = 2 * hidden if eagle3 else hidden
        q, k, v = (self._heads(letter, wide) for letter in "qkv")
        bias = self._fused("bias", "qkv") if c.attention_bias else None
        halves = [self._get(f"mlp.{n}_proj.weight", inner, hidden) for n in ("gate", "up")]
        layer = Layer(
            window=None,
            qkv=self._linear(torch.cat((q, k, v), dim=1).flatten(0, 2), bias),
            qk_weight=self._qk_weight() if c.qk_norm else None,
            out=self._linear(self._get("self_attn.o_proj.weight", hidden, width)),
            gate_up=self._linear(torch.cat(halves), None, self._norm("post_attention_layernorm")),
            down=self._linear(self._get("mlp.down_proj.weight", hidden, inner)),
        )
        if not eagle3:
            front = self.fc(2 * hidden)
            return layer, StateReading(front, None, None, None, plain_in=True, plain_out=True)
        kv_bias = self._fused("bias", "kv") if c.attention_bias else None
        reading = StateReading(
            front=None,
            only_kv=self._linear(torch.cat((k, v), dim=1).flatten(0, 2), kv_bias),
            token_norm=self._norm("input_layernorm"),
            state_norm=self._norm("hidden_norm"),
            normed_residual=self.head.norm_before_residual,
        )
        return layer, reading

    def fc(self, reads: int) -> Linear:
        bias = self.weights.get("fc.bias", self.config.hidden_size) if self.head.fc_bias else None
        weight = self.weights.get("fc.weight", self.config.hidden_size, reads)
        return self._linear(weight, bias)

    def lm_head(self, vocabulary: Tensor | None, target_head: Tensor) -> Linear:
        c, eagle3 = self.config, self.head.kind == "eagle3"
        count = self.head.draft_vocab_size
        if "lm_head.weight" in self.weights.names:
            rows = self.weights.get("lm_head.weight", count, c.hidden_size)
        elif target_head.shape[1] != c.hidden_size:
            rows = self.weights.get("lm_head.weight", count, c.hidden_size)  # it is missing
        else:
            rows = target_head if vocabulary is None else target_head[vocabulary]
        return self._linear(rows, None, self._norm("norm", "") if eagle3 else None)

    def embedding(self, target: Model) -> Tensor | CompiledProduct:
        c, name = self.config, "embed_tokens.weight"
        if name in self.weights.names and target.config.hidden_size != c.hidden_size:
            return self.weights.get(name, c.vocab_size, c.hidden_size).to(self.dtype).contiguous()
        if target.config.hidden_size != c.hidden_size:
            return self.weights.get(name, c.vocab_size, c.hidden_size)  # it is missing
        return target.embedding

    def read_norms(self, target: Model) -> Tensor | None:
        """Before fc: [layers, H], or of all together [layers * H]; of EAGLE-1 the model's last."""
        count, size = len(self.head.hidden_layers), target.config.hidden_size
        if self.head.kind == "eagle":
            return target.final_norm
        if self.head.input_norm:
            return self.weights.get("input_norm.weight", count * size).float()
        if not self.head.fc_norm:
            return None
        each = [self.weights.get(f"fc_norm.{i}.weight", size) for i in range(count)]
        return torch.stack(each).float()

    def _linear(
        self, weight: Tensor, bias: Tensor | None = None, in_scale: Tensor | None = None
    ) -> Linear:
        shape = weight.shape[0], weight.shape[1]
        plan = make_plan(shape, self.dtype, invariant=True, may_pack=False)
        bias = None if bias is None else bias.to(self.dtype)
        return Linear(weight.to(self.dtype).contiguous(), bias, in_scale, plan)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self.weights.get(f"layers.0.{name}", *shape).to(self.dtype)

    def _norm(self, name: str, prefix: str = "layers.0.") -> Tensor:
        size = self.config.hidden_size
        return self.weights.get(f"{prefix}{name}.weight", size).float().contiguous() * size**0.5

    def _heads(self, letter: str, *columns: int, kind: str = "weight") -> Tensor:
        """[kv_heads, heads of each, head_dim, columns]."""
        c = self.config
        count = c.num_heads if letter == "q" else c.num_kv_heads
        part = self._get(f"self_attn.{letter}_proj.{kind}", count * c.head_dim, *columns)
        if letter != "v":
            part = interleave_halves(part, c.head_dim)
        return part.view(c.num_kv_heads, -1, c.head_dim, *columns)

    def _fused(self, kind: str, letters: str) -> Tensor:
        return torch.cat([self._heads(each, kind=kind) for each in letters], dim=1).flatten()

    def _qk_weight(self) -> Tensor:
        c = self.config
        q, k = (
            interleave_halves(self._get(f"self_attn.{n}_norm.weight", c.head_dim), c.head_dim)
            for n in "qk"
        )
        return torch.stack([q] * c.group_size + [k]).float()


def _vocabulary(head: HeadConfig, weights: HeadWeights) -> Tensor | None:
    """Ids of the target, from the offsets `d2t`. Raises ModelError where they are none."""
    count, vocab = head.draft_vocab_size, head.layer.vocab_size
    if count == vocab:
        return None
    ids = weights.any("d2t", count).long() + torch.arange(count)
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        problem = f"tensor d2t gives ids that are not ascending within the vocabulary of {vocab}"
        raise ModelError(f"{weights.file}: {problem}; use a head that was trained for this model")
    return ids
