"""The layers of a decoder, fused from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch.runtime.cpu.compiled import MOST_LANES, Blocks, CompiledProduct, Run, compiles_blocks
from cbatch.runtime.cpu.linear import Linear, ProductPlan, make_plan
from cbatch.runtime.cpu.numerics import Numerics
from cbatch.runtime.cpu.products import Kind
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.rope import interleave_halves
from cbatch.runtime.model.weight_files import WeightSource


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
        num_logits: int | None = None,
    ) -> None:
        """`num_logits` of the head, if it has not all."""
        self._num_logits = num_logits or config.vocab_size
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.numerics = numerics
        # Where our kernels would multiply with what blocks could be widened to.
        self._takes_blocks = device.type == "cpu" and self._plan(1, 1).kind is Kind.COMPILED

    def build(self) -> tuple[Tensor | CompiledProduct, list[Layer], Linear]:
        """Embedding (a product if of blocks: the head's, where they are tied), layers, head."""
        c, name = self.config, "model.embed_tokens.weight"
        layers = [self._layer(i) for i in range(c.num_layers)]
        norm, shape = self._norm("model.norm.weight"), (c.vocab_size, c.hidden_size)
        blocks = self._blocks([name])
        if blocks is None:
            embedding = self._get(name, *shape)
            if c.tie_embeddings:
                return embedding, layers, self._linear(embedding, None, norm)
        else:
            packed = CompiledProduct.of_blocks(
                _stacked(blocks), None, norm if c.tie_embeddings else None
            )
            if c.tie_embeddings:
                return packed, layers, Linear.of(packed)
        shape = self._num_logits, c.hidden_size
        head = self._below(["lm_head.weight"], shape, None, norm)
        return (embedding if blocks is None else packed), layers, head

    def final_norm(self) -> Tensor:
        """The weight of the norm before the head, fp32, for who reads what it makes."""
        return self._get("model.norm.weight", self.config.hidden_size).float()

    def _blocks(self, names: list[str]) -> list[Blocks] | None:
        """Tensors as they are stored, where our kernels take them all."""
        found = [self.source.blocks(name) for name in names] if self._takes_blocks else []
        blocks = [Blocks(b.type.name, b.shape[1], b.rows) for b in found if b is not None]
        return blocks if len(blocks) == len(names) and all(map(compiles_blocks, blocks)) else None

    def _below(
        self,
        names: list[str],
        shape: tuple[int, int],
        bias: Tensor | None,
        in_scale: Tensor | None,
    ) -> Linear:
        """Of tensors of one shape, below one another."""
        stored = self._as_stored(names, bias, in_scale)
        if stored is not None:
            return stored
        weights = [self._get(name, *shape) for name in names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self._linear(weight, bias, in_scale)

    def _as_stored(
        self, names: list[str], bias: Tensor | None, in_scale: Tensor | None
    ) -> Linear | None:
        """Of tensors below one another in the blocks they come in, if we multiply with such."""
        blocks = self._blocks(names)
        if blocks is None:
            return None
        return Linear.of(CompiledProduct.of_blocks(_stacked(blocks), bias, in_scale))

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        return Linear(weight, bias, in_scale, self._plan(*weight.shape))

    def _plan(self, out: int, columns: int) -> ProductPlan:
        invariant, may_pack = self.numerics.mode == "invariant", self.numerics.may_pack
        return make_plan((out, columns), self.dtype, invariant=invariant, may_pack=may_pack)

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
        out_bias = down_bias = gate_up_bias = None
        if c.attention_out_bias:
            out_bias = self._get(f"{attention}.o_proj.bias", c.hidden_size)
        halves = ("gate_proj", "up_proj")
        if c.mlp_bias:
            biases = [self._get(f"{mlp}.{n}.bias", c.intermediate_size) for n in halves]
            gate_up_bias = torch.cat(biases)
            down_bias = self._get(f"{mlp}.down_proj.bias", c.hidden_size)
        return Layer(
            window=c.sliding_window[index],
            qkv=self._qkv(attention, self._norm(f"{name}.input_layernorm.weight")),
            qk_weight=self._qk_weight(attention) if c.qk_norm else None,
            out=self._below([f"{attention}.o_proj.weight"], (c.hidden_size, width), out_bias, None),
            gate_up=self._below(
                [f"{mlp}.{half}.weight" for half in halves],
                (c.intermediate_size, c.hidden_size),
                gate_up_bias,
                self._norm(f"{name}.post_attention_layernorm.weight"),
            ),
            down=self._below(
                [f"{mlp}.down_proj.weight"],
                (c.hidden_size, c.intermediate_size),
                down_bias,
                None,
            ),
        )

    def _qkv(self, attention: str, norm: Tensor) -> Linear:
        """Rows [kv_heads, group + 2, head_dim]: see `HeadShape`."""
        c = self.config
        bias = self._fuse(attention, "bias") if c.attention_bias else None
        blocks = self._blocks([f"{attention}.{letter}_proj.weight" for letter in "qkv"])
        if blocks is None or c.head_dim % MOST_LANES:
            return self._linear(self._fuse(attention, "weight", c.hidden_size), bias, norm)
        dim, pitch, at = c.head_dim, (c.group_size + 2) * c.head_dim, 0
        parts = []
        for letter, part in zip("qkv", blocks, strict=True):
            if letter != "v":
                rows = interleave_halves(torch.from_numpy(part.rows), dim).numpy()
                part = part._replace(rows=rows)
            run = c.group_size * dim if letter == "q" else dim
            parts.append((part, Run(run, pitch, at)))
            at += run
        return Linear.of(CompiledProduct.of_blocks(parts, bias, norm))

    def _fuse(self, attention: str, kind: str, *columns: int) -> Tensor:
        return self._heads(attention, "qkv", kind, *columns)

    def _heads(self, attention: str, letters: str, kind: str, *columns: int) -> Tensor:
        """Of these projections, those of a KV head together: [out, columns]."""
        c = self.config
        parts = []
        for letter in letters:
            heads = c.num_heads if letter == "q" else c.num_kv_heads
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


def _stacked(blocks: Sequence[Blocks]) -> list[tuple[Blocks, Run]]:
    """Below one another."""
    parts, at = [], 0
    for each in blocks:
        rows = len(each.rows)
        parts.append((each, Run(rows, rows, at)))
        at += rows
    return parts
