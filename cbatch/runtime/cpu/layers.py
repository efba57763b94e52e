"""Decoder layers with the products of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.compiled import (
    MAX_LANES,
    Blocks,
    CompiledProduct,
    OutputRuns,
    compiles,
    compiles_blocks,
)
from cbatch.runtime.compiled.experts import CompiledExperts, Gate, Gating
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.cpu.lowering import folded
from cbatch.runtime.layers import LayerBuilder
from cbatch.runtime.model.records import Attention, Experts
from cbatch.runtime.model.rope import interleave_halves


class CpuLayerBuilder(LayerBuilder[Linear]):
    """Builds layers for a CPU. If our kernels compute the products, quantised tensors are
    multiplied as stored, without widening them."""

    @cached_property
    def compiled(self) -> bool:
        """True if our kernels compute the products; otherwise torch does."""
        return compiles(self.dtype)

    def _embedding(
        self, name: str, bias: Tensor | None, norm: Tensor | None
    ) -> tuple[Any, Linear | None]:
        """Return embedding and tied LM head. A quantised embedding is a product; if tied, the same
        product is the LM head."""
        blocks, tied = self._blocks([name]), self.config.tie_embeddings
        if blocks is None:
            return super()._embedding(name, bias, norm)
        product = CompiledProduct.of_blocks(_stacked(blocks), None, norm if tied else None)
        return product, Linear.of(product) if tied else None

    def _blocks(self, names: list[str]) -> list[Blocks] | None:
        stored = [self.source.blocks(name) for name in names] if self.compiled else []
        blocks = [Blocks(b.type.name, b.shape[-1], b.rows) for b in stored if b is not None]
        return blocks if len(blocks) == len(names) and all(map(compiles_blocks, blocks)) else None

    def _as_stored(
        self, names: list[str], bias: Tensor | None, in_scale: Tensor | None
    ) -> Linear | None:
        blocks = self._blocks(names)
        if blocks is None:
            return None
        return Linear.of(CompiledProduct.of_blocks(_stacked(blocks), bias, in_scale))

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        if self.compiled:
            weight, in_scale = folded(weight, in_scale)
        return Linear(weight, bias, in_scale, compiled=self.compiled)

    def _moe_fields(self, mlp: str, experts: Experts, norm: Tensor | None) -> dict[str, Any]:
        count, hidden, inner = experts.count, self.config.hidden_size, experts.inner
        biased = experts.bias
        shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        stored = self._stored_experts(mlp, experts, [out for out, _ in shapes.values()])
        parts = stored or [
            [*self._get(f"{mlp}.experts.{n}", count, *shape)] for n, shape in shapes.items()
        ]
        biases = [
            self._get(f"{mlp}.experts.{n}_bias", count, shape[0]) if biased else None
            for n, shape in shapes.items()
        ]
        rows = self._get(f"{mlp}.gate.weight", count, hidden)
        bias = self._get(f"{mlp}.gate.bias", count).float() if biased else None
        correction = None
        if experts.corrected:
            correction = self._get(f"{mlp}.expert_bias", count).float()
        if experts.shared:  # split into experts of width `inner`
            shared, all_inner = f"{mlp}.shared_expert", experts.shared_inner
            padding = 0, experts.shared * inner - all_inner
            gate, up = (
                self._get(f"{shared}.{n}_proj.weight", all_inner, hidden) for n in ("gate", "up")
            )
            down = self._get(f"{shared}.down_proj.weight", hidden, all_inner)
            gate, up = (F.pad(half, (0, 0, *padding)) for half in (gate, up))
            halves = zip(gate.split(inner), up.split(inner), strict=True)
            parts[0] += [torch.cat(both) for both in halves]
            parts[1] += F.pad(down, padding).split(inner, dim=1)
            if experts.shared_gate:
                gate = self._get(f"{mlp}.shared_expert_gate.weight", 1, hidden)
            else:  # the sigmoid of this bias is 1
                gate, bias = rows.new_zeros(1, hidden), torch.zeros(count + 1)
                bias[count] = 100.0
            rows = torch.cat([rows, gate])
        experts_of = CompiledExperts.of if self.compiled else _torch_experts
        experts_of = _experts_of_blocks if stored else experts_of
        gating = Gating[experts.activation.upper()]
        gate_function = Gate(gating, experts.limit, experts.alpha)
        return {
            "gate_up": Linear(rows.float(), bias, None, compiled=self.compiled),
            "down": None,
            "experts": experts_of(*parts, gate_function, *biases),
            "router_norm": norm,
            "router_bias": correction,
        }

    def _stored_experts(
        self, mlp: str, experts: Experts, outputs: list[int]
    ) -> list[list[Blocks]] | None:
        """Return each expert's matrices as stored, gate_up and down; None if unsupported. With
        shared experts all are widened, since the shared ones may be of another type."""
        names = [f"{mlp}.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        stored = None if experts.shared else self._blocks(names)
        if stored is None:
            return None
        return [
            [each._replace(rows=rows.reshape(out, -1)) for rows in each.rows]
            for each, out in zip(stored, outputs, strict=True)
        ]

    def _qkv(
        self, attention: str, m: Attention, norm: Tensor | None, shift: Tensor | None = None
    ) -> Linear:
        blocks = self._blocks([f"{attention}.{letter}_proj.weight" for letter in "qkv"])
        if blocks is None or m.key_dim % MAX_LANES or m.value_dim % MAX_LANES:
            return super()._qkv(attention, m, norm, shift)
        bias = self._heads(attention, m, "qkv", "bias") if m.bias else None
        pitch, at = m.row_width // m.kv_heads, 0
        runs = {"q": m.group * m.key_dim, "k": m.key_dim, "v": m.value_dim}
        if m.gate:  # a gate follows each query
            of_heads = blocks[0].rows.reshape(m.heads, 2, m.key_dim, -1)
            halves = (of_heads[:, half].reshape(m.heads * m.key_dim, -1) for half in (0, 1))
            queries, gates = (blocks[0]._replace(rows=rows) for rows in halves)
            blocks, runs = [queries, *blocks[1:], gates], runs | {"g": m.group * m.value_dim}
        parts = []
        for letter, part in zip(runs, blocks, strict=True):
            if letter in "qk":
                rows = interleave_halves(torch.from_numpy(part.rows), m.rope, m.key_dim).numpy()
                part = part._replace(rows=rows)
            parts.append((part, OutputRuns(runs[letter], pitch, at)))
            at += runs[letter]
        return Linear.of(CompiledProduct.of_blocks(parts, bias, norm))


def _experts_of_blocks(
    gate_up: Sequence[Blocks], down: Sequence[Blocks], gate: Gate, *biases: Tensor | None
) -> CompiledExperts:
    """Return the products of each expert, of weights as stored."""
    products = [
        [
            CompiledProduct.of_blocks(_stacked([each]), None if bias is None else bias[i], None)
            for i, each in enumerate(part)
        ]
        for part, bias in zip((gate_up, down), biases, strict=True)
    ]
    return CompiledExperts(*products, gate)


def _torch_experts(
    gate_up: Sequence[Tensor], down: Sequence[Tensor], gate: Gate, *biases: Tensor | None
) -> list[tuple[Linear, ...]]:
    """Return the products of each expert."""
    return [
        tuple(
            Linear(weight, None if bias is None else bias[i], None, compiled=False)
            for weight, bias in zip(both, biases, strict=True)
        )
        for i, both in enumerate(zip(gate_up, down, strict=True))
    ]


def _stacked(blocks: Sequence[Blocks]) -> list[tuple[Blocks, OutputRuns]]:
    parts, at = [], 0
    for block in blocks:
        rows = len(block.rows)
        parts.append((block, OutputRuns(rows, rows, at)))
        at += rows
    return parts
