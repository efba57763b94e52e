"""A decoder's layer in one call, for passes whose other operations are not ours."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, c_float, c_long, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.cpu.compiled.build import library
from cbatch.runtime.cpu.compiled.experts import Gating
from cbatch.runtime.cpu.compiled.layer_attention import (
    AttendedStepStruct,
    AttentionStep,
    LayerAttention,
    LayerStruct,
)
from cbatch.runtime.cpu.compiled.product import TYPES, CompiledProduct, LinearStruct
from cbatch.runtime.cpu.compiled.rows import RowNorm
from cbatch.runtime.cpu.compiled.structs import fields

_ALONE_BELOW = 1 << 18  # multiplications, as of one product


class _Norm(ctypes.Structure):
    """`row_norm` of fused_layer.h."""

    _fields_ = [("weight", c_void_p), *fields(c_float, "eps offset"), ("width", c_long)]


class _Fused(ctypes.Structure):
    """`fused_layer` of fused_layer.h."""

    _fields_ = [
        *fields(LinearStruct, "qkv out gate_up down"),
        *fields(_Norm, "before behind before_forward behind_forward query key"),
        *fields(c_long, "hidden inner gating"),
        ("by", c_float),
    ]


class _FusedStep(ctypes.Structure):
    """`fused_step` of fused_layer.h."""

    _fields_ = [
        *fields(c_void_p, "x cos sin y normed memory"),
        *fields(c_long, "turned threads"),
    ]


class LayerNorms(NamedTuple):
    """Before and behind attention and feed-forward; of queries and of keys, each head or a whole
    row. None where there is none."""

    before: RowNorm | None = None
    behind: RowNorm | None = None
    before_forward: RowNorm | None = None
    behind_forward: RowNorm | None = None
    query: RowNorm | None = None
    key: RowNorm | None = None


class Gated(NamedTuple):
    """down(gate(gate_up(x))), of gates, then ups."""

    gate_up: CompiledProduct
    down: CompiledProduct
    gating: Gating


class FusedLayer:
    """h = x + by * behind(out(attention(qkv(before(x))))), whose queries and keys are normed and
    rotated by halves; y = h + by * behind_forward(forward(before_forward(h)))."""

    def __init__(
        self,
        qkv: CompiledProduct,
        out: CompiledProduct,
        attention: LayerAttention,
        norms: LayerNorms,
        forward: Gated | None,
        by: float = 1.0,
    ) -> None:
        """qkv makes rows of queries, keys, values. Without `forward` it is another's. Raises
        ValueError where shapes do not go together."""
        _check(qkv, out, attention, norms, forward)
        kernel = library()
        assert kernel is not None  # it has made the products
        self.attention, self._held = attention, (qkv, out, norms, forward)  # structs hold addresses
        self.hidden, self.forwards = qkv.shape[1], forward is not None
        products = [qkv.struct, out.struct]
        products += [LinearStruct()] * 2 if forward is None else [p.struct for p in forward[:2]]
        self._struct = _Fused(
            *products,
            *map(_norm, norms),
            self.hidden,
            0 if forward is None else forward.down.shape[1],
            0 if forward is None else forward.gating,
            by,
        )
        self._weights = sum(o * i for o, i in (p.shape for p in (qkv, out, *(forward or ())[:2])))
        self._bytes, self._run = kernel.fused_bytes, kernel.run_fused
        self._bytes.argtypes = [POINTER(_Fused), POINTER(LayerStruct), c_long]
        self._bytes.restype = c_long
        structs = AttendedStepStruct, LayerStruct, _Fused, _FusedStep
        self._run.argtypes, self._run.restype = [POINTER(each) for each in structs], None
        weakref.finalize(self, _let_go, kernel, self._struct, self._held)

    @property
    def whole(self) -> bool:
        """Whether all products are of fp32, and no number is rounded further."""
        qkv, out, _, forward = self._held
        products = [qkv, out, *(() if forward is None else forward[:2])]
        return all(product.types == {TYPES[torch.float32]} for product in products)

    def __call__(
        self, step: AttentionStep, blocks: Tensor, x: Tensor, turn: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """(y, None) of x fp32 [..., hidden], whose rows are the step's, or (h, before_forward(h))
        without a feed-forward. K and V go to `blocks`, as of `AttentionStep.attend`. `turn` is cos
        and sin [..., R], R even and at most a head's width, a row for each of x; None: nothing
        turns. Raises ValueError where shapes differ."""
        rows, turned = step.struct.rows, 0 if turn is None else turn[0].shape[-1]
        if x.numel() != rows * self.hidden or x.dtype != torch.float32:
            raise ValueError(f"x: {x.dtype} of {tuple(x.shape)} for {rows} rows of {self.hidden}")
        if turned % 2 or turned > self.attention.shape.key_dim:
            raise ValueError(f"turn: {turned} of {self.attention.shape.key_dim} dimensions")
        if turn is not None and any(each.numel() != rows * turned for each in turn):
            raise ValueError(f"turn: {[tuple(e.shape) for e in turn]} for {rows} rows")
        x = x.contiguous()
        cos, sin = (None, None) if turn is None else (each.float().contiguous() for each in turn)
        y = torch.empty_like(x)
        normed = None if self.forwards else torch.empty_like(x)
        attention = self.attention.struct
        step.point(self.attention, blocks)
        working = step.memory(self._bytes(self._struct, attention, rows))
        self._run(
            step.struct,
            attention,
            self._struct,
            _FusedStep(
                x.data_ptr(),
                None if cos is None else cos.data_ptr(),
                None if sin is None else sin.data_ptr(),
                y.data_ptr(),
                None if normed is None else normed.data_ptr(),
                working,
                turned,
                1 if rows * self._weights < _ALONE_BELOW else step.struct.threads,
            ),
        )
        return y, normed


def _let_go(kernel: ctypes.CDLL, *held: object) -> None:
    """Goes when no thread looks at it any more."""
    kernel.rest()


def _norm(norm: RowNorm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.address, *norm.numbers, norm.width)


def _check(
    qkv: CompiledProduct,
    out: CompiledProduct,
    attention: LayerAttention,
    norms: LayerNorms,
    forward: Gated | None,
) -> None:
    """Raises ValueError."""
    of, hidden = attention.shape, qkv.shape[1]
    made = (of.heads + of.kv_heads) * of.key_dim + of.kv_heads * of.value_dim
    products = [qkv, out] if forward is None else [qkv, out, forward.gate_up, forward.down]
    wanted = [(made, hidden), (hidden, of.heads * of.value_dim)]
    if forward is not None:
        inner = forward.down.shape[1]
        wanted += [(2 * inner, hidden), (hidden, inner)]
        if forward.gating not in (Gating.SILU, Gating.GELU_TANH):
            raise ValueError(f"forward: gates of {forward.gating.name}")
    if [product.shape for product in products] != wanted:
        raise ValueError(f"products: of {[product.shape for product in products]}, not {wanted}")
    if any(product.scaled for product in products):
        raise ValueError("products: one scales what it is given")
    if any(norm is not None and norm.width != hidden for norm in norms[:4]):
        raise ValueError(f"norms: of other rows than {hidden}")
    for norm, heads in ((norms.query, of.heads), (norms.key, of.kv_heads)):
        if norm is not None and norm.width not in (of.key_dim, heads * of.key_dim):
            raise ValueError(f"norms: {norm.width} of {heads} heads of {of.key_dim}")
