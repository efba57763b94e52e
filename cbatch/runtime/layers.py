"""Decoder layers, fused from the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cbatch.runtime.model.config import Experts, ModelConfig
from cbatch.runtime.model.rope import interleave_halves
from cbatch.runtime.model.shapes import Numerics
from cbatch.runtime.model.weight_files import WeightSource

P = TypeVar("P")  # a device's product with constant weights


@dataclass
class Layer(Generic[P]):
    """One decoder layer.

    `qk_weight` is [group + 1, head_dim], q rows then k, or [kv_heads, group + 1, head_dim] if all
    heads are normed together. Norm weights are fp32, multiplied by sqrt(n). With `experts`,
    `gate_up` is the router, and `router_norm` the norm before the router and the experts.
    """

    window: int | None
    qkv: P
    qk_weight: Tensor | None
    out: P
    gate_up: P
    down: P | None
    after_attention: Tensor | None = None
    after_forward: Tensor | None = None
    sinks: Tensor | None = None
    experts: Any = None
    router_norm: Tensor | None = None

    def products(self) -> tuple[P, ...]:
        linears = self.qkv, self.out, self.gate_up
        return linears if self.down is None else (*linears, self.down)


class LayerBuilder(Generic[P]):
    """Fuses the tensors of a checkpoint into layers. Subclasses make the products of a device."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        numerics: Numerics,
        num_logits: int | None = None,
    ) -> None:
        """`num_logits`: the number of rows of the LM head; None: the vocabulary size."""
        self._num_logits = num_logits or config.vocab_size
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.numerics = numerics

    def build(self) -> tuple[Any, list[Layer[P]], P]:
        """Return embedding, layers and LM head."""
        c = self.config
        layers = [self._layer(i) for i in range(c.num_layers)]
        norm = self._norm("model.norm")
        if c.arithmetic.logit_scale != 1.0:
            norm = norm * c.arithmetic.logit_scale
        bias = self._get("lm_head.bias", c.vocab_size) if c.arithmetic.head_bias else None
        embedding, head = self._embedding("model.embed_tokens.weight", bias, norm)
        if head is None:
            shape = self._num_logits, c.hidden_size
            head = self._product(["lm_head.weight"], shape, bias, norm, "model.norm")
        return embedding, layers, head

    def _embedding(self, name: str, bias: Tensor | None, norm: Tensor) -> tuple[Any, P | None]:
        embedding = self._get(name, self.config.vocab_size, self.config.hidden_size)
        if not self.config.tie_embeddings:
            return embedding, None
        bias = self._full_bias(embedding, bias, "model.norm")
        return embedding, self._linear(embedding, bias, norm)

    def final_norm(self) -> Tensor:
        """Return the weight of the norm before the LM head, fp32, for heads that apply it, too."""
        return self._norm_weight("model.norm")

    def _product(
        self,
        names: list[str],
        shape: tuple[int, int],
        bias: Tensor | None,
        in_scale: Tensor | None,
        norm: str | None = None,
    ) -> P:
        """Return one product of several tensors of one shape, stacked by rows. `norm` names the
        norm before the product."""
        stored = self._as_stored(names, bias, in_scale)
        if stored is not None:
            return stored
        weights = [self._get(name, *shape) for name in names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self._linear(weight, self._full_bias(weight, bias, norm), in_scale)

    def _full_bias(self, weight: Tensor, bias: Tensor | None, norm: str | None) -> Tensor | None:
        """Return the bias, plus the norm's bias times the weight."""
        if norm is None or not self.config.arithmetic.norm_bias:
            return bias
        shift = weight.float() @ self._get(f"{norm}.bias", weight.shape[1]).float()
        return shift if bias is None else shift + bias.float()

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> P:
        raise NotImplementedError

    def _as_stored(
        self, names: list[str], bias: Tensor | None, in_scale: Tensor | None
    ) -> P | None:
        """Return one product of tensors as stored, stacked by rows; None if unsupported."""
        return None

    def _moe_fields(self, mlp: str, experts: Experts, norm: Tensor | None) -> dict[str, Any]:
        raise NotImplementedError

    def _qkv(self, attention: str, norm: Tensor | None, name: str | None = None) -> P:
        """Return the QKV product, rows [kv_heads, group + 2, head_dim]: queries, key and value of
        each KV head. `name` names the norm before the product."""
        bias = self._fuse(attention, "bias") if self.config.attention_bias else None
        weight = self._fuse(attention, "weight", self.config.hidden_size)
        return self._linear(weight, self._full_bias(weight, bias, name), norm)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self.source.get(name, shape).to(self.device, self.dtype)

    def _norm(self, module: str) -> Tensor:
        """Return the weight of a norm times sqrt(n), fp32 (see `_normed` of torch_pass.py)."""
        return self._norm_weight(module) * self.config.hidden_size**0.5

    def _norm_weight(self, module: str) -> Tensor:
        size, a = self.config.hidden_size, self.config.arithmetic
        weight = self._get(f"{module}.weight", size).float() if a.norm_weights else torch.ones(size)
        return weight + a.norm_offset if a.norm_offset else weight

    def _layer(self, index: int) -> Layer[P]:
        c, a, name = self.config, self.config.arithmetic, f"model.layers.{index}"
        attention, width = f"{name}.self_attn", c.num_heads * c.head_dim
        names = [norm and f"{name}.{norm}" for norm in a.norms]
        norms = [None if norm is None else self._norm(norm) for norm in names]
        sinks = self._get(f"{attention}.sinks", c.num_heads).float() if a.sinks else None
        out_bias = None
        if c.attention_out_bias:
            out_bias = self._get(f"{attention}.o_proj.bias", c.hidden_size)
        qkv = self._qkv(attention, norms[0], names[0])
        out = self._product([f"{attention}.o_proj.weight"], (c.hidden_size, width), out_bias, None)
        if a.experts is not None and index not in a.experts.dense_layers:
            feed_forward = self._moe_fields(f"{name}.mlp", a.experts, norms[2])
        else:
            feed_forward = self._feed_forward(f"{name}.mlp", norms[2], names[2])
        return Layer(
            window=c.sliding_window[index],
            qkv=qkv,
            qk_weight=self._qk_weight(attention) if c.qk_norm else None,
            out=out,
            after_attention=norms[1],
            after_forward=norms[3],
            sinks=sinks,
            **feed_forward,
        )

    def _feed_forward(self, mlp: str, in_scale: Tensor | None, norm: str | None) -> dict[str, Any]:
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        halves = [f"{mlp}.{half}" for half in ("gate_proj", "up_proj")[1 - c.arithmetic.gated :]]
        bias = down_bias = None
        if c.mlp_bias:
            bias = torch.cat([self._get(f"{half}.bias", inner) for half in halves])
            down_bias = self._get(f"{mlp}.down_proj.bias", hidden)
        weights = [f"{half}.weight" for half in halves]
        gate_up = self._product(weights, (inner, hidden), bias, in_scale, norm)
        down = self._product([f"{mlp}.down_proj.weight"], (hidden, inner), down_bias, None)
        return {"gate_up": gate_up, "down": down}

    def _fuse(self, attention: str, kind: str, *columns: int) -> Tensor:
        return self._heads(attention, "qkv", kind, *columns)

    def _heads(self, attention: str, letters: str, kind: str, *columns: int) -> Tensor:
        """Return the named projections with the rows of each KV head adjacent: [out, columns]."""
        c = self.config
        parts = []
        for letter in letters:
            heads = c.num_heads if letter == "q" else c.num_kv_heads
            part = self._get(f"{attention}.{letter}_proj.{kind}", heads * c.head_dim, *columns)
            if letter != "v":
                part = interleave_halves(part, c.rope, c.head_dim)
            parts.append(part.view(c.num_kv_heads, -1, c.head_dim, *columns))
        return torch.cat(parts, dim=1).flatten(0, 2)

    def _qk_weight(self, attention: str) -> Tensor:
        c, offset = self.config, self.config.arithmetic.norm_offset
        whole = c.num_kv_heads if c.arithmetic.whole_qk_norm else 0
        heads = {"q": whole * c.group_size or 1, "k": whole or 1}
        q, k = (
            interleave_halves(
                self._get(f"{attention}.{n}_norm.weight", count * c.head_dim), c.rope, c.head_dim
            ).float()
            + offset
            for n, count in heads.items()
        )
        if not whole:
            return torch.stack([q] * c.group_size + [k])
        weights = q.view(whole, -1, c.head_dim), k.view(whole, 1, c.head_dim)
        return torch.cat(weights, dim=1).contiguous()
