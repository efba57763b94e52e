"""The products and norms of a decoder on a GPU, and their builder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.layers import LayerBuilder
from cbatch.runtime.model.records import Attention, Experts, FeedForward, Norm
from triton_kernels.layers.norm import norm_rows
from triton_kernels.products.dense import dense
from triton_kernels.products.grouped import Matrices
from triton_kernels.products.quantised import Packed, pack, quantised


class DeviceNorm(NamedTuple):
    """A norm of rows [T, n] with its parameters, fp32 [n]."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm of `x`. With `residual`, `x` is first added to it in place, and the norm
        is of the sum."""
        return norm_rows(
            x, self.weight, self.eps, residual, bias=self.bias, centred=self.centred, early=True
        )


class Dense(NamedTuple):
    """A linear layer computed by a library, and the norm before it. A row's bits may depend on the
    number of rows."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    norm: DeviceNorm | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def weights(self) -> tuple[Tensor | Packed, ...]:
        return (self.weight,)

    def into(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self.weight.t(), out=out)
        if self.bias is not None:
            out.add_(self.bias)


class InvariantDense(Dense):
    """A linear layer computed by the project's batch-invariant kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.weight))
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        dense(x, self.weight, self.bias, out)


class QuantisedDense(NamedTuple):
    """A linear layer with 4- or 8-bit weights, computed by the project's batch-invariant kernel."""

    packed: Packed
    bias: Tensor | None
    norm: DeviceNorm | None = None

    @property
    def weights(self) -> tuple[Packed]:
        return (self.packed,)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.packed.shape[0])
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        quantised(x, self.packed, self.bias, out)


class ProductBuilder(LayerBuilder[Any]):
    """Builds layers for a GPU. Norms are not folded into the linear layers. Only weights that are
    quantised in the file are packed."""

    def _linear(self, weight: Tensor, bias: Tensor | None, in_scale: Any) -> Any:
        kind = InvariantDense if self.numerics == "invariant" else Dense
        return kind(weight.contiguous(), bias, in_scale)

    def _packed(self, names: list[str]) -> list[Packed] | None:
        """Return quantised tensors in one format of the kernel; None if that is impossible."""
        parts = []
        for name in names:
            blocks = self.source.blocks(name)
            packed = blocks and pack(blocks.type.name, torch.from_numpy(blocks.matrix))
            if packed is None:
                return None
            parts.append(packed)
        if len({(packed.codes.dtype, packed.scales.dtype) for packed in parts}) > 1:
            return None
        if any(packed.offsets is not None for packed in parts):
            parts = [
                p if p.offsets is not None else p._replace(offsets=-8 * p.scales) for p in parts
            ]
        return parts

    def _quantised(
        self,
        parts: list[Packed],
        fuse: Callable[[list[Tensor]], Tensor],
        bias: Tensor | None,
        in_scale: Any,
    ) -> Any:
        fields = [[f for f in field if f is not None] for field in zip(*parts, strict=True)]
        fused = [fuse(each).contiguous().to(self.device) if each else None for each in fields]
        return QuantisedDense(Packed(*fused), bias, in_scale)  # type: ignore[arg-type]

    def _as_stored(self, names: list[str], bias: Tensor | None, in_scale: Any) -> Any:
        parts = self._packed(names)
        return None if parts is None else self._quantised(parts, torch.cat, bias, in_scale)

    def _qkv(self, attention: str, m: Attention, norm: Any, shift: Tensor | None = None) -> Any:
        parts = self._packed([f"{attention}.{letter}_proj.weight" for letter in "qkv"])
        if parts is None:
            return super()._qkv(attention, m, norm, shift)

        def fuse(qkv: list[Tensor]) -> Tensor:
            return self._by_head(m, "qkv", qkv)

        bias = self._heads(attention, m, "qkv", "bias") if m.bias else None
        return self._quantised(parts, fuse, bias, norm)

    def _arranged(self, parts: list[Tensor], gates: list[Tensor]) -> Tensor:
        """Return gates after the rows of all heads."""
        heads = super()._arranged(parts, [])
        return torch.cat([heads, *(gate.flatten(0, 1) for gate in gates)])

    def _norm(self, place: str, norm: Norm | None, scale: float = 1.0) -> Any:
        if norm is None:
            return None
        weight, bias = self._norm_weight(place, norm).to(self.device), super()._shift(place, norm)
        bias = None if bias is None else bias.float() * scale
        return DeviceNorm(weight * scale, bias, norm.eps, norm.centred)

    def _shift(self, place: str, norm: Norm | None) -> None:
        """Return None: the norm itself adds its bias."""

    def _moe_fields(self, mlp: str, experts: Experts, norm: Any) -> dict[str, Any]:
        f, hidden = experts, self.config.hidden_size
        router = self._get(f"{mlp}.gate.weight", f.count, hidden)
        bias = self._get(f"{mlp}.gate.bias", f.count) if f.bias else None
        correction = self._get(f"{mlp}.expert_bias", f.count).float() if f.corrected else None
        shared = None
        if f.shared:
            if f.shared_gate:
                gate = self._get(f"{mlp}.shared_expert_gate.weight", 1, hidden)
            else:  # the sigmoid of this bias is 1
                gate, bias = router.new_zeros(1, hidden), router.new_zeros(f.count + 1)
                bias[f.count] = 100.0
            router = torch.cat([router, gate])
            dense = FeedForward(inner=f.shared_inner, activation=f.activation)
            shared = self._feed_forward(f"{mlp}.shared_expert", dense, None, None)
        gate_up = self._matrices(f"{mlp}.experts.gate_up_proj", f, 2 * f.inner, hidden)
        down = self._matrices(f"{mlp}.experts.down_proj", f, hidden, f.inner)
        return {
            "gate_up": InvariantDense(router, bias, norm),
            "down": None,
            "experts": (gate_up, down, shared),
            "router_bias": correction,
        }

    def _matrices(self, name: str, f: Experts, outs: int, columns: int) -> Matrices:
        """Return the matrices of all experts, the rows of gate and up in turns."""

        def placed(part: Tensor) -> Tensor:
            part = part.to(self.device)
            if name.endswith("gate_up_proj"):
                part = part.unflatten(0, (f.count, 2, f.inner)).transpose(1, 2).flatten(0, 2)
            return part.contiguous()

        bias = placed(self._get(f"{name}_bias", f.count, outs).view(-1)) if f.bias else None
        stored = self._packed([name])
        if stored is not None:
            codes, scales, offsets = stored[0]
            packed = Packed(
                placed(codes), placed(scales), None if offsets is None else placed(offsets)
            )
            return Matrices(packed, bias)
        return Matrices(placed(self._get(name, f.count, outs, columns).flatten(0, 1)), bias)
