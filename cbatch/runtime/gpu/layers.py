"""Decoder layers on a GPU. `lower` decides, layer by layer, which kernels a record uses.

A branch's output is added to the residual stream by what reads the stream next, usually in the
kernel of a norm. Operations of torch here are elementwise, so a row's bits do not depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.experts import ExpertsForward
from cbatch.runtime.gpu.products import DeviceNorm
from cbatch.runtime.layers import Layer
from cbatch.runtime.model.records import Attention, Branch, Experts, FeedForward, Recurrence
from triton_kernels.layers.activation import activate
from triton_kernels.layers.kv_write import kv_write


class FlatTokens(NamedTuple):
    """The T tokens of a pass. Padding rows have slot -1: their K and V are not written."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T], absolute
    slots: Tensor  # int32 [T]: place of K and V in the cache, block * block_size + offset

    def first(self, count: int) -> FlatTokens:
        return FlatTokens(*(field[:count] for field in self))


class LayerPass(NamedTuple):
    """Inputs that all layers of a pass share. `attention` is planned for the tokens, `tables` has
    the rotary table of each layer."""

    flat: FlatTokens
    attention: PagedAttention
    tables: Sequence[Any]


class DeviceForward(Protocol):
    """A feed-forward: maps rows [T, hidden] to new ones, or to `out`. `products` are its linear
    layers, or callables whose `weights` are those of several."""

    @property
    def products(self) -> tuple[Any, ...]: ...

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor: ...


class DenseForward:
    """Two linear layers and an activation between them."""

    def __init__(
        self, record: FeedForward, gate_up: Any, down: Any, xielu: Tensor | None = None
    ) -> None:
        self._record, self._xielu, self.products = record, xielu, (gate_up, down)

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        gate_up, down = self.products
        f, factors = self._record, self._xielu
        inner = activate(gate_up(rows), f.activation, gated=f.gated, factors=factors, early=True)
        if out is None:
            return down(inner)
        down.into(inner, out)
        return out


class AttentionMixer:
    """Attention over paged KV, of layer `index`."""

    def __init__(self, index: int, record: Attention, layer: Layer[Any]) -> None:
        self._index, self._record = index, record
        self.products = layer.qkv, layer.out
        self._qk_weight, self._sinks = layer.qk_weight, layer.sinks

    def _heads(self, projected: Tensor) -> Tensor:
        """Return q, k and v [T, kv_heads, group + 2, head_dim], which come before gates."""
        m = self._record
        width = m.kv_heads * (m.group + 2) * m.key_dim
        return projected[:, :width].unflatten(1, (m.kv_heads, m.group + 2, m.key_dim))

    def project(self, rows: Tensor, at: LayerPass) -> Tensor:
        """Write K and V to the cache; return the first product's rows, with queries rotated."""
        m, attention = self._record, at.attention
        projected: Tensor = self.products[0](rows)
        k_pages, v_pages = attention.pages(self._index)
        k_scale, v_scale = attention.scales[self._index]
        kv_write(
            self._heads(projected),
            at.flat.positions,
            at.flat.slots,
            at.tables[self._index],
            k_pages,
            v_pages,
            qk_weight=self._qk_weight,
            eps=0.0 if m.qk_norm is None else m.qk_norm.eps,
            k_scale=k_scale,
            v_scale=v_scale,
            norms_rotated=m.norms_rotated,
            early=True,
        )
        return projected

    def attend(self, projected: Tensor, at: LayerPass) -> Tensor:
        """Return the mixer's output [T, hidden]."""
        m, queries = self._record, self._heads(projected)[:, :, : self._record.group]
        mixed = at.attention.run(
            self._index, m.window, queries, m.scale, m.soft_cap or None, self._sinks
        )
        if m.gate:
            mixed *= projected[:, -mixed.shape[1] :].sigmoid()
        return self.products[1](mixed)


class RecurrentMixer:
    """A mixer with a state by block, of layer `index`."""

    def __init__(self, index: int, layer: Layer[Any]) -> None:
        assert layer.recurrence is not None
        self._index, self._weights = index, layer.recurrence
        self.products = layer.qkv, layer.out

    def project(self, rows: Tensor, at: LayerPass) -> Tensor:
        """Return the rows of the first product."""
        projected: Tensor = self.products[0](rows)
        return projected

    def attend(self, projected: Tensor, at: LayerPass) -> Tensor:
        """Return the mixer's output [T, hidden]."""
        return self.products[1](at.attention.recur(self._index, projected, self._weights))


def bytes_of_mixer(m: Attention | Recurrence, item_bytes: int) -> int:
    """Return the bytes of a token's activations in a mixer."""
    if isinstance(m, Attention):
        gates = m.heads * m.value_dim if m.gate else 0
        return (m.row_width + m.heads * m.key_dim + gates) * item_bytes
    return (m.row_width + m.inner) * item_bytes + 4 * (m.channels + m.inner + m.heads)


class DecoderLayer:
    """A layer: its mixer and its feed-forward, with the norms around them."""

    def __init__(
        self,
        layer: Layer[Any],
        norms: Sequence[DeviceNorm | None],
        mixer: Any,
        forward: DeviceForward | None,
    ) -> None:
        """`norms`: before the mixer and before the feed-forward."""
        self.record, self.mixer, self._forward = layer.record, mixer, forward
        self._norm, self._forward_norm = norms
        self._after = layer.after_attention, layer.after_forward

    def products(self) -> tuple[Any, ...]:
        return *self.mixer.products, *(() if self._forward is None else self._forward.products)

    def enter(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to the residual stream, fp32 [T, hidden]; return the rows that the mixer
        reads."""
        if self.record.joint:  # it reads the stream before `x`
            rows = _added(self._norm, torch.zeros_like(x), residual)
            residual.add_(x)
            return rows
        return _added(self._norm, x, residual)

    def finish(
        self,
        projected: Tensor,
        rows: Tensor,
        residual: Tensor,
        at: LayerPass,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the rest of a layer from its projections and the rows that they were made of.
        Return what the next layer adds to the residual stream, in `out` if given."""
        forward: Any = self.record.feed_forward
        mixed = _joined(self.record.mixer, self.mixer.attend(projected, at), self._after[0])
        if self._forward is None:
            return mixed if out is None else out.copy_(mixed)
        if self.record.parallel:
            residual.add_(mixed)
        else:
            rows = _added(self._forward_norm, mixed, residual)
        if forward.adds_plainly:
            return self._forward(rows, out)
        x = _joined(forward, self._forward(rows), self._after[1])
        return x if out is None else out.copy_(x)


def _added(norm: DeviceNorm | None, x: Tensor, residual: Tensor) -> Tensor:
    """Add `x` to the residual stream; return its norm."""
    return residual.add_(x).to(x.dtype) if norm is None else norm(x, residual)


def _joined(branch: Branch, x: Tensor, out_norm: Any) -> Tensor:
    """Return what a branch adds to the residual stream."""
    if out_norm is not None:
        x = out_norm(x)
    return x if branch.out_scale == 1.0 else x * branch.out_scale


def lower(index: int, layer: Layer[Any]) -> DecoderLayer:
    """Return a layer by the kernels of a GPU. It must be supported; see `unsupported_on_gpu`."""
    m, f = layer.record.mixer, layer.record.feed_forward
    mixer: Any = (
        RecurrentMixer(index, layer)
        if isinstance(m, Recurrence)
        else AttentionMixer(index, m, layer)
    )
    forward: DeviceForward | None = None
    if isinstance(f, Experts):
        gate_up, down, shared = layer.experts
        if shared is not None:
            dense = FeedForward(inner=f.shared_inner, activation=f.activation)
            shared = DenseForward(dense, shared["gate_up"], shared["down"])
        router = layer.gate_up, layer.router_bias
        forward = ExpertsForward(f, *router, gate_up, down, shared)
    elif f is not None:
        forward = DenseForward(f, layer.gate_up, layer.down, layer.xielu)
    norms = layer.qkv.norm, None if f is None else layer.gate_up.norm
    return DecoderLayer(layer, norms, mixer, forward)
