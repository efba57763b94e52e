"""Decoder layers with the products of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.compiled import MAX_LANES, Blocks, CompiledProduct, OutputRuns, compiles_blocks
from cbatch.runtime.compiled.experts import CompiledExperts, Gate, Gating
from cbatch.runtime.cpu.linear import Linear, ProductPlan, make_plan
from cbatch.runtime.cpu.products import Kind
from cbatch.runtime.layers import LayerBuilder
from cbatch.runtime.model.config import Experts
from cbatch.runtime.model.rope import interleave_halves


class CpuLayerBuilder(LayerBuilder[Linear]):
    """Builds layers for a CPU. If our kernels compute the products, quantised tensors are
    multiplied as stored, without widening them."""

    @cached_property
    def _supports_blocks(self) -> bool:
        return self._plan(1, 1).kind is Kind.COMPILED

    def _embedding(self, name: str, bias: Tensor | None, norm: Tensor) -> tuple[Any, Linear | None]:
        """Return embedding and tied LM head. A quantised embedding is a product; if tied, the same
        product is the LM head."""
        blocks, tied = self._blocks([name]), self.config.tie_embeddings
        if blocks is None:
            return super()._embedding(name, bias, norm)
        product = CompiledProduct.of_blocks(_stacked(blocks), None, norm if tied else None)
        return product, Linear.of(product) if tied else None

    def _blocks(self, names: list[str]) -> list[Blocks] | None:
        stored = [self.source.blocks(name) for name in names] if self._supports_blocks else []
        blocks = [Blocks(b.type.name, b.shape[1], b.rows) for b in stored if b is not None]
        return blocks if len(blocks) == len(names) and all(map(compiles_blocks, blocks)) else None

    def _as_stored(
        self, names: list[str], bias: Tensor | None, in_scale: Tensor | None
    ) -> Linear | None:
        blocks = self._blocks(names)
        if blocks is None:
            return None
        return Linear.of(CompiledProduct.of_blocks(_stacked(blocks), bias, in_scale))

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Linear:
        return Linear(weight, bias, in_scale, self._plan(*weight.shape))

    def _plan(self, out: int, columns: int) -> ProductPlan:
        # Only our kernels compute models that are not plain, whatever is faster.
        invariant = self.numerics.mode == "invariant" or not self.config.plain
        may_pack = self.numerics.may_pack
        return make_plan((out, columns), self.dtype, invariant=invariant, may_pack=may_pack)

    def _moe_fields(self, mlp: str, experts: Experts, norm: Tensor | None) -> dict[str, Any]:
        count, hidden, inner = experts.count, self.config.hidden_size, experts.width
        biased = self.config.arithmetic.activation == "clamped"
        shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        parts = [[*self._get(f"{mlp}.experts.{n}", count, *shape)] for n, shape in shapes.items()]
        biases = [
            self._get(f"{mlp}.experts.{n}_bias", count, shape[0]) if biased else None
            for n, shape in shapes.items()
        ]
        rows = self._get(f"{mlp}.gate.weight", count, hidden)
        bias = self._get(f"{mlp}.gate.bias", count).float() if biased else None
        if experts.shared:  # split into experts of width `inner`
            shared, all_inner = f"{mlp}.shared_expert", experts.shared * inner
            gate, up = (
                self._get(f"{shared}.{n}_proj.weight", all_inner, hidden) for n in ("gate", "up")
            )
            down = self._get(f"{shared}.down_proj.weight", hidden, all_inner)
            halves = zip(gate.split(inner), up.split(inner), strict=True)
            parts[0] += [torch.cat(both) for both in halves]
            parts[1] += down.split(inner, dim=1)
            rows = torch.cat([rows, self._get(f"{mlp}.shared_expert_gate.weight", 1, hidden)])
        gating = Gating[self.config.arithmetic.activation.upper()]
        gate_function = Gate(gating, experts.limit, experts.alpha)
        plan = make_plan(tuple(rows.shape), torch.float32, invariant=True, may_pack=False)
        return {
            "gate_up": Linear(rows.float(), bias, None, plan),
            "down": None,
            "experts": CompiledExperts.of(*parts, gate_function, *biases),
            "router_norm": norm,
        }

    def _qkv(self, attention: str, norm: Tensor | None, name: str | None = None) -> Linear:
        c = self.config
        blocks = self._blocks([f"{attention}.{letter}_proj.weight" for letter in "qkv"])
        if blocks is None or c.head_dim % MAX_LANES:
            return super()._qkv(attention, norm, name)
        bias = self._fuse(attention, "bias") if c.attention_bias else None
        dim, pitch, at = c.head_dim, (c.group_size + 2) * c.head_dim, 0
        parts = []
        for letter, part in zip("qkv", blocks, strict=True):
            if letter != "v":
                rows = interleave_halves(torch.from_numpy(part.rows), c.rope, dim).numpy()
                part = part._replace(rows=rows)
            run = c.group_size * dim if letter == "q" else dim
            parts.append((part, OutputRuns(run, pitch, at)))
            at += run
        return Linear.of(CompiledProduct.of_blocks(parts, bias, norm))


def _stacked(blocks: Sequence[Blocks]) -> list[tuple[Blocks, OutputRuns]]:
    parts, at = [], 0
    for block in blocks:
        rows = len(block.rows)
        parts.append((block, OutputRuns(rows, rows, at)))
        at += rows
    return parts
