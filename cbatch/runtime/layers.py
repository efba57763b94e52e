"""Decoder layers, fused from the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention, Experts, FeedForward, LayerRecord, Norm
from cbatch.runtime.model.rope import interleave_halves
from cbatch.runtime.model.weight_files import WeightSource

_BODY = "model"  # the module that holds the last norm
P = TypeVar("P")  # a device's product with constant weights


@dataclass
class Layer(Generic[P]):
    """The weights of one decoder layer.

    `qk_weight` is [group + 1, head_dim], q rows then k, or [kv_heads, group + 1, head_dim] if all
    heads are normed together. Norm weights are fp32, multiplied by sqrt(n). With `experts`,
    `gate_up` is the router, and `router_norm` the norm before the router and the experts.
    """

    record: LayerRecord
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


class PairWeights(NamedTuple):
    """The weights of a `PairInput`: products of a device, and norm weights times sqrt(hidden).
    `only_kv` has the first layer's K and V projections, for passes without logits."""

    input_layer: Any = None
    only_kv: Any = None
    token_norm: Tensor | None = None
    state_norm: Tensor | None = None


class LayerBuilder(Generic[P]):
    """Fuses the tensors of a checkpoint into layers. Subclasses make the products of a device."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        numerics: str,
        num_logits: int | None = None,
    ) -> None:
        """`num_logits`: the number of rows of the LM head; None: the vocabulary size."""
        self._num_logits = num_logits or config.vocab_size
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.numerics = numerics

    def build(self) -> tuple[Any, list[Layer[P]], P]:
        """Return embedding, layers and LM head."""
        c = self.config
        layers = [self._layer(f"model.layers.{i}", each) for i, each in enumerate(c.layers)]
        norm = self._norm(_BODY, c.norm, c.logit_scale)
        bias = self._get("lm_head.bias", c.vocab_size) if c.head_bias else None
        embedding, head = self._embedding("model.embed_tokens.weight", bias, norm)
        if head is None:
            shape = self._num_logits, c.hidden_size
            head = self._product(["lm_head.weight"], shape, bias, norm, self._shift(_BODY, c.norm))
        return embedding, layers, head

    def _embedding(
        self, name: str, bias: Tensor | None, norm: Tensor | None
    ) -> tuple[Any, P | None]:
        embedding = self._get(name, self.config.vocab_size, self.config.hidden_size)
        if not self.config.tie_embeddings:
            return embedding, None
        bias = _full_bias(embedding, bias, self._shift(_BODY, self.config.norm))
        return embedding, self._linear(embedding, bias, norm)

    def final_norm(self) -> Tensor:
        """Return the weight of the norm before the LM head, fp32, for heads that apply it, too."""
        assert self.config.norm is not None
        return self._norm_weight(_BODY, self.config.norm)

    def _product(
        self,
        names: list[str],
        shape: tuple[int, int],
        bias: Tensor | None,
        in_scale: Tensor | None,
        shift: Tensor | None = None,
    ) -> P:
        """Return one product of several tensors of one shape, stacked by rows. `shift` is the bias
        of the norm before the product."""
        stored = self._as_stored(names, bias, in_scale)
        if stored is not None:
            return stored
        weights = [self._get(name, *shape) for name in names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self._linear(weight, _full_bias(weight, bias, shift), in_scale)

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> P:
        raise NotImplementedError

    def _as_stored(
        self, names: list[str], bias: Tensor | None, in_scale: Tensor | None
    ) -> P | None:
        """Return one product of tensors as stored, stacked by rows; None if unsupported."""
        return None

    def _moe_fields(self, mlp: str, experts: Experts, norm: Tensor | None) -> dict[str, Any]:
        raise NotImplementedError

    def _qkv(
        self, attention: str, m: Attention, norm: Tensor | None, shift: Tensor | None = None
    ) -> P:
        """Return the QKV product, rows [kv_heads, (group + 1) * key_dim + value_dim]: queries, key
        and value of each KV head."""
        bias = self._heads(attention, m, "qkv", "bias") if m.bias else None
        weight = self._heads(attention, m, "qkv", "weight", self.config.hidden_size)
        return self._linear(weight, _full_bias(weight, bias, shift), norm)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self.source.get(name, shape).to(self.device, self.dtype)

    def _norm(self, place: str, norm: Norm | None, scale: float = 1.0) -> Any:
        """Return a norm whose output is multiplied by `scale`, in the form of a device. Here it is
        the weight times sqrt(n), fp32: x / sqrt(sum(x^2) + n eps) is then multiplied by it."""
        if norm is None:
            return None
        weight = self._norm_weight(place, norm) * self.config.hidden_size**0.5
        return weight if scale == 1.0 else weight * scale

    def _norm_weight(self, place: str, norm: Norm) -> Tensor:
        size = self.config.hidden_size
        if not norm.has_weight:
            return torch.ones(size)
        weight = self._get(f"{place}.{norm.name}.weight", size).float()
        return weight + norm.offset if norm.offset else weight

    def _shift(self, place: str, norm: Norm | None) -> Tensor | None:
        """Return the bias of a norm."""
        if norm is None or not norm.has_bias:
            return None
        return self._get(f"{place}.{norm.name}.bias", self.config.hidden_size)

    def _layer(self, name: str, record: LayerRecord) -> Layer[P]:
        m, f, hidden = record.mixer, record.feed_forward, self.config.hidden_size
        assert f is not None
        _require_supported(m, f)
        attention, mlp, width = f"{name}.self_attn", f"{name}.mlp", m.heads * m.value_dim
        sinks = self._get(f"{attention}.sinks", m.heads).float() if m.sinks else None
        bias = self._get(f"{attention}.o_proj.bias", hidden) if m.out_bias else None
        qkv = self._qkv(attention, m, self._norm(name, m.norm), self._shift(name, m.norm))
        out = self._product([f"{attention}.o_proj.weight"], (hidden, width), bias, None)
        norm = self._norm(name, f.norm)
        if isinstance(f, Experts):
            feed_forward = self._moe_fields(mlp, f, norm)
        else:
            feed_forward = self._feed_forward(mlp, f, norm, self._shift(name, f.norm))
        return Layer(
            record=record,
            qkv=qkv,
            qk_weight=self._qk_weight(attention, m),
            out=out,
            after_attention=self._norm(name, m.out_norm),
            after_forward=self._norm(name, f.out_norm),
            sinks=sinks,
            **feed_forward,
        )

    def _feed_forward(
        self, mlp: str, f: FeedForward, in_scale: Tensor | None, shift: Tensor | None
    ) -> dict[str, Any]:
        hidden, inner = self.config.hidden_size, f.inner
        halves = [f"{mlp}.{half}" for half in ("gate_proj", "up_proj")[1 - f.gated :]]
        bias = down_bias = None
        if f.bias:
            bias = torch.cat([self._get(f"{half}.bias", inner) for half in halves])
            down_bias = self._get(f"{mlp}.down_proj.bias", hidden)
        weights = [f"{half}.weight" for half in halves]
        gate_up = self._product(weights, (inner, hidden), bias, in_scale, shift)
        down = self._product([f"{mlp}.down_proj.weight"], (hidden, inner), down_bias, None)
        return {"gate_up": gate_up, "down": down}

    def _heads(
        self, attention: str, m: Attention, letters: str, kind: str, *columns: int
    ) -> Tensor:
        """Return the named projections with the rows of each KV head adjacent: [out, columns]."""
        parts = []
        for letter in letters:
            rows = m.kv_heads * m.value_dim
            if letter != "v":
                rows = (m.heads if letter == "q" else m.kv_heads) * m.key_dim
            part = self._get(f"{attention}.{letter}_proj.{kind}", rows, *columns)
            if letter != "v":
                part = interleave_halves(part, m.rope, m.key_dim)
            parts.append(part.view(m.kv_heads, -1, *columns))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _qk_weight(self, attention: str, m: Attention) -> Tensor | None:
        if m.qk_norm is None:
            return None
        whole, dim = m.kv_heads if m.norms_whole else 0, m.key_dim
        heads = {"q": whole * m.group or 1, "k": whole or 1}
        q, k = (
            interleave_halves(
                self._get(f"{attention}.{n}_{m.qk_norm.name}.weight", count * dim), m.rope, dim
            ).float()
            + m.qk_norm.offset
            for n, count in heads.items()
        )
        if not whole:
            return torch.stack([q] * m.group + [k])
        weights = q.view(whole, -1, dim), k.view(whole, 1, dim)
        return torch.cat(weights, dim=1).contiguous()


def _require_supported(m: Attention, f: FeedForward | Experts) -> None:
    """Assert that no field is set that no device computes."""
    unbiased = [m.out_norm, f.out_norm, m.qk_norm]
    if isinstance(f, Experts):
        unbiased.append(f.norm)
    assert not any(norm is not None and norm.has_bias for norm in unbiased)
    assert m.qk_norm is None or (m.qk_norm.has_weight and not m.qk_norm.centred)
    assert f.activation != "clamped" or isinstance(f, Experts)


def _full_bias(weight: Tensor, bias: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """Return the bias, plus the bias `shift` of the norm before the product times the weight."""
    if shift is None:
        return bias
    moved = weight.float() @ shift.float()
    return moved if bias is None else moved + bias.float()
