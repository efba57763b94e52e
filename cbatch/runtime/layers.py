"""Decoder layers, fused from the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import softplus

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import (
    Attention,
    Experts,
    FeedForward,
    LayerInputs,
    LayerRecord,
    Norm,
    Recurrence,
    padded,
)
from cbatch.runtime.model.rope import interleave_halves
from cbatch.runtime.model.weight_files import WeightSource

_BODY = "model"  # the module that holds the last norm
_XIELU_BETA = 0.5  # where a checkpoint lacks it
P = TypeVar("P")  # a device's product with constant weights


class RecurrenceWeights(NamedTuple):
    """The weights of a `Recurrence` except its products, fp32. `decay` is -exp(A_log), `skip` is
    Mamba's D. `norm` is [value_dim], or of a scan [inner]."""

    conv: Tensor  # [kernel, padded channels]
    conv_bias: Tensor | None = None
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None


class InputWeights(NamedTuple):
    """The weights of `LayerInputs`: the second embedding [vocab, layers * width], the projection of
    the first, and the norm's weight [width] times sqrt(width / 2), fp32."""

    table: Any
    projection: Any
    norm: Tensor


@dataclass
class Layer(Generic[P]):
    """The weights of one decoder layer.

    `qk_weight` is [group + 1, head_dim], q rows then k, or [kv_heads, group + 1, head_dim] if all
    heads are normed together. Norm weights are fp32, multiplied by sqrt(n). With `experts`,
    `gate_up` is the router, and `router_norm` the norm before the router and the experts;
    `router_bias` is added to sigmoids when experts are chosen. Of a recurrent layer, `qkv` is the
    projection before the convolution. `xielu` has the activation's factors for x^2 above 0, for
    e^x - 1 - x below, and for x; fp32. `injection` has both products of that branch, and its norm.
    The layer's output is multiplied by `scale`.
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
    xielu: Tensor | None = None
    router_bias: Tensor | None = None
    recurrence: RecurrenceWeights | None = None
    injection: tuple[P, P, Tensor] | None = None
    scale: float = 1.0

    def products(self) -> tuple[P, ...]:
        injected = () if self.injection is None else self.injection[:2]
        linears = self.qkv, self.out, self.gate_up, self.down, *injected
        return tuple(linear for linear in linears if linear is not None)


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

    def layer_inputs(self, inputs: LayerInputs) -> InputWeights:
        c = self.config
        width = inputs.width * c.num_layers
        table = self._table("model.embed_tokens_per_layer.weight", (c.vocab_size, width))
        names, shape = ["model.per_layer_model_projection.weight"], (width, c.hidden_size)
        norm = self._get(f"model.{inputs.norm.name}.weight", inputs.width).float()
        return InputWeights(
            table, self._product(names, shape, None, None), norm * (inputs.width / 2) ** 0.5
        )

    def _table(self, name: str, shape: tuple[int, int]) -> Any:
        return self._get(name, *shape)

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

    def _stacked(self, rows: dict[str, int], bias: Tensor | None, in_scale: Tensor | None) -> P:
        """Return one product of the named tensors, which have these numbers of rows."""
        stored = self._as_stored([*rows], bias, in_scale)
        if stored is not None:
            return stored
        hidden = self.config.hidden_size
        weight = torch.cat([self._get(name, count, hidden) for name, count in rows.items()])
        return self._linear(weight, bias, in_scale)

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
        and value of each KV head, and the gates of its queries; only queries if K and V are another
        layer's."""
        bias = self._heads(attention, m, m.projections, "bias") if m.bias else None
        weight = self._heads(attention, m, m.projections, "weight", self.config.hidden_size)
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
        m, f = record.mixer, record.feed_forward
        _require_supported(m, f)
        mlp = f"{name}.mlp"
        if isinstance(m, Recurrence):
            mixer = self._recurrence(f"{name}.linear_attn", m, self._norm(name, m.norm))
        else:
            mixer = self._attention(name, m)
        norm = None if f is None else self._norm(name, f.norm)
        feed_forward: dict[str, Any] = {"gate_up": None, "down": None}
        if isinstance(f, Experts):
            feed_forward = self._moe_fields(mlp, f, norm)
        elif f is not None:
            feed_forward = self._feed_forward(mlp, f, norm, self._shift(name, f.norm))
        return Layer(
            record=record,
            after_attention=self._norm(name, m.out_norm),
            after_forward=None if f is None else self._norm(name, f.out_norm),
            injection=self._injection(name, record.injection),
            scale=self._get(f"{name}.layer_scalar", 1).item() if record.scaled else 1.0,
            **mixer,
            **feed_forward,
        )

    def _attention(self, name: str, m: Attention) -> dict[str, Any]:
        attention, hidden = f"{name}.self_attn", self.config.hidden_size
        sinks = self._get(f"{attention}.sinks", m.heads).float() if m.sinks else None
        bias = self._get(f"{attention}.o_proj.bias", hidden) if m.out_bias else None
        names, shape = [f"{attention}.o_proj.weight"], (hidden, m.heads * m.value_dim)
        return {
            "qkv": self._qkv(attention, m, self._norm(name, m.norm), self._shift(name, m.norm)),
            "qk_weight": self._qk_weight(attention, m),
            "out": self._product(names, shape, bias, None),
            "sinks": sinks,
        }

    def _recurrence(self, name: str, m: Recurrence, norm: Tensor | None) -> dict[str, Any]:
        hidden, channels = self.config.hidden_size, m.channels
        parts = {"in_proj": m.row_width}
        if m.rule == "delta":
            parts = {"in_proj_qkv": channels, "in_proj_z": m.inner}
            parts |= {"in_proj_b": m.heads, "in_proj_a": m.heads}
        bias = self._get(f"{name}.in_proj.bias", m.row_width) if m.bias else None
        out_bias = self._get(f"{name}.out_proj.bias", hidden) if m.out_bias else None
        weights = {f"{name}.{part}.weight": rows for part, rows in parts.items()}
        conv = self._get(f"{name}.conv1d.weight", channels, 1, m.kernel).float()[:, 0].T
        padding = 0, padded(channels) - channels
        of_heads, norm_weight = {}, None
        if m.key_dim:
            of_heads["decay"] = self.source.decay(name, m.heads).to(self.device)
            of_heads["step_bias"] = self._get(f"{name}.dt_bias", m.heads).float()
        if m.rule == "scan":
            of_heads["skip"] = self._get(f"{name}.D", m.heads).float()
        if m.norm_eps:
            width = m.inner if m.rule == "scan" else m.value_dim
            norm_weight = self._get(f"{name}.norm.weight", width).float()
        conv_bias = None
        if m.conv_bias:
            conv_bias = F.pad(self._get(f"{name}.conv1d.bias", channels).float(), padding)
        shape = hidden, m.inner
        return {
            "qkv": self._stacked(weights, bias, norm),
            "qk_weight": None,
            "out": self._product([f"{name}.out_proj.weight"], shape, out_bias, None),
            "recurrence": RecurrenceWeights(
                F.pad(conv, padding).contiguous(), conv_bias, norm=norm_weight, **of_heads
            ),
        }

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
        xielu = self._xielu(f"{mlp}.act_fn") if f.activation == "xielu" else None
        return {"gate_up": gate_up, "down": down, "xielu": xielu}

    def _injection(self, name: str, f: FeedForward | None) -> tuple[P, P, Tensor] | None:
        if f is None:
            return None
        hidden = self.config.hidden_size
        gate = self._product([f"{name}.per_layer_input_gate.weight"], (f.inner, hidden), None, None)
        down = self._product([f"{name}.per_layer_projection.weight"], (hidden, f.inner), None, None)
        return gate, down, self._norm(name, f.out_norm)

    def _xielu(self, name: str) -> Tensor:
        """Return the factors of xIELU (arXiv:2411.13010), whose logarithms are weights."""
        linear = self.source.scalar(f"{name}.beta") or _XIELU_BETA
        above, below = (softplus(self.source.get(f"{name}.alpha_{n}", (1,)).float()) for n in "pn")
        return torch.cat([above, below + linear, torch.tensor([linear])]).to(self.device)

    def _heads(
        self, attention: str, m: Attention, letters: str, kind: str, *columns: int
    ) -> Tensor:
        """Return the named projections of queries, keys and values in the order of `_qkv`."""
        rows = {"q": m.heads * m.key_dim * (1 + m.gate), "k": m.kv_heads * m.key_dim}
        rows["v"] = m.kv_heads * m.value_dim
        names = {letter: f"{attention}.{letter}_proj.{kind}" for letter in letters}
        parts = [self._get(names[letter], rows[letter], *columns) for letter in letters]
        return self._by_head(m, letters, parts)

    def _by_head(self, m: Attention, letters: str, projections: list[Tensor]) -> Tensor:
        """Return the rows of projections with those of each KV head adjacent: [out, columns].
        Values are from the third one."""
        parts, gates = [], []
        for place, (letter, part) in enumerate(zip(letters, projections, strict=True)):
            columns, is_value = part.shape[1:], letter == "v" or place == 2
            if letter == "q" and m.gate:
                part, gate = part.unflatten(0, (m.heads, 2, -1)).unbind(1)
                part, gates = part.flatten(0, 1), [gate.reshape(m.kv_heads, -1, *columns)]
            if not is_value:
                part = interleave_halves(part, m.rope, m.key_dim)
            parts.append(part.view(m.kv_heads, -1, *columns))
        return self._arranged(parts, gates)

    def _arranged(self, parts: list[Tensor], gates: list[Tensor]) -> Tensor:
        """Return the rows of all heads, each [kv_heads, rows, ...]."""
        return torch.cat(parts + gates, dim=1).flatten(0, 1)

    def _qk_weight(self, attention: str, m: Attention) -> Tensor | None:
        if m.qk_norm is None:
            return None
        whole, dim = m.kv_heads if m.norms_whole else 0, m.key_dim
        heads = {"q": whole * m.group or 1, "k": whole or 1}
        if m.kv_from is not None:
            del heads["k"]
        q, *k = (
            interleave_halves(
                self._get(f"{attention}.{n}_{m.qk_norm.name}.weight", count * dim), m.rope, dim
            ).float()
            + m.qk_norm.offset
            for n, count in heads.items()
        )
        if not whole:
            return torch.stack([q] * m.group + k)
        weights = q.view(whole, -1, dim), k[0].view(whole, 1, dim)
        return torch.cat(weights, dim=1).contiguous()


def _require_supported(m: Attention | Recurrence, f: FeedForward | Experts | None) -> None:
    """Assert that no field is set that no device computes."""
    unbiased = [m.out_norm, None if f is None else f.out_norm]
    if isinstance(m, Recurrence):
        unbiased.append(m.norm)
    else:
        unbiased.append(m.qk_norm)
        assert m.qk_norm is None or (m.qk_norm.has_weight and not m.qk_norm.centred)
    if isinstance(f, Experts):
        unbiased.append(f.norm)
    assert not any(norm is not None and norm.has_bias for norm in unbiased)
    assert f is None or f.activation != "clamped" or isinstance(f, Experts)
    assert f is None or f.activation != "xielu" or isinstance(f, FeedForward)


def _full_bias(weight: Tensor, bias: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """Return the bias, plus the bias `shift` of the norm before the product times the weight."""
    if shift is None:
        return bias
    # In fp64, because bits of torch's sums in fp32 depend on where in memory the weight is.
    moved = (weight.double() @ shift.double()).float()
    return moved if bias is None else moved + bias.float()
