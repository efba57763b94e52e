"""The layers of a decoder, fused from the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch.runtime.cpu.linear import Linear, make_plan
from cbatch.runtime.cpu.numerics import Numerics
from cbatch.runtime.model.checkpoint import WeightSource
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.rope import interleave_halves


@dataclass
class Layer:
    window: int | None
    qkv: Linear
    qk_weight: Tensor | None  # [group + 1, head_dim], q rows then k, where the family norms them
    out: Linear
    gate_up: Linear
    down: Linear

    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class LayerBuilder:
    """Fuses the tensors of a checkpoint into the layers above."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        numerics: Numerics,
    ) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.numerics = numerics

    def build(self) -> tuple[Tensor, list[Layer], Linear]:
        c = self.config
        embedding = self._get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        layers = [self._layer(i) for i in range(c.num_layers)]
        head = embedding
        if not c.tie_embeddings:
            head = self._get("lm_head.weight", c.vocab_size, c.hidden_size)
        return embedding, layers, self._linear(head, None, self._norm("model.norm.weight"))

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        plan = make_plan(
            (weight.shape[0], weight.shape[1]),
            self.dtype,
            invariant=self.numerics.mode == "invariant",
            may_pack=self.numerics.may_pack,
        )
        return Linear(weight, bias, in_scale, plan)

    def _get(self, name: str, *shape: int) -> Tensor:
        return self.source.get(name, shape).to(self.device, self.dtype)

    def _norm(self, name: str) -> Tensor:
        """Weight of a norm times sqrt(n), fp32 (see `_normed`)."""
        size = self.config.hidden_size
        return self._get(name, size).float() * size**0.5

    def _layer(self, index: int) -> Layer:
        c, name = self.config, f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        width = c.num_heads * c.head_dim
        out = self._get(f"{attention}.o_proj.weight", c.hidden_size, width)
        out_bias = down_bias = gate_up_bias = None
        if c.attention_out_bias:
            out_bias = self._get(f"{attention}.o_proj.bias", c.hidden_size)
        halves = ("gate_proj", "up_proj")
        gate_up = [
            self._get(f"{mlp}.{n}.weight", c.intermediate_size, c.hidden_size) for n in halves
        ]
        down = self._get(f"{mlp}.down_proj.weight", c.hidden_size, c.intermediate_size)
        if c.mlp_bias:
            biases = [self._get(f"{mlp}.{n}.bias", c.intermediate_size) for n in halves]
            gate_up_bias = torch.cat(biases)
            down_bias = self._get(f"{mlp}.down_proj.bias", c.hidden_size)
        return Layer(
            window=c.sliding_window[index],
            qkv=self._qkv(attention, self._norm(f"{name}.input_layernorm.weight")),
            qk_weight=self._qk_weight(attention) if c.qk_norm else None,
            out=self._linear(out, out_bias, None),
            gate_up=self._linear(
                torch.cat(gate_up),
                gate_up_bias,
                self._norm(f"{name}.post_attention_layernorm.weight"),
            ),
            down=self._linear(down, down_bias, None),
        )

    def _qkv(self, attention: str, norm: Tensor) -> Linear:
        """Rows [kv_heads, group + 2, head_dim]: see `HeadShape`."""
        c = self.config
        weight = self._fuse(attention, "weight", c.hidden_size)
        bias = self._fuse(attention, "bias") if c.attention_bias else None
        return self._linear(weight, bias, norm)

    def _fuse(self, attention: str, kind: str, *columns: int) -> Tensor:
        c = self.config
        parts = []
        for letter, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            part = self._get(f"{attention}.{letter}_proj.{kind}", heads * c.head_dim, *columns)
            if letter != "v":
                part = interleave_halves(part, c.head_dim)
            parts.append(part.view(c.num_kv_heads, -1, c.head_dim, *columns))
        return torch.cat(parts, dim=1).flatten(0, 2)

    def _qk_weight(self, attention: str) -> Tensor:
        c = self.config
        q, k = (
            interleave_halves(self._get(f"{attention}.{n}_norm.weight", c.head_dim), c.head_dim)
            for n in "qk"
        )
        return torch.stack([q] * c.group_size + [k]).float()
