"""Implementations of y = (x * in_scale) W^T + bias over fp32 rows: [T, in] -> [T, out], contiguous.

- *native*: `F.linear` in the dtype of the weights.
- *packed*: MKL's fp32 product with weights packed once. In fp32 it computes 8 rows in about the
  time of one. bf16 weights are widened to fp32 first (the same values; activations are not
  rounded). Without bf16 instructions it is far faster than native from a few rows on.
- *compiled*: our own kernel, see `compiled`. With bf16 weights, activations are rounded to bf16 if
  the processor multiplies pairs of bf16; otherwise they are not rounded.

`linear` decides which implementation is used.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct

_PACK_ROWS = 64  # row count that MKL packs for; the packing serves all counts, nearly at best speed

Product = Callable[[Tensor, int], Tensor]  # (rows, number of rows) -> outputs


class Kind(enum.Enum):
    NATIVE = "native"
    PACKED = "packed"
    COMPILED = "compiled"

    def of(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> Product:
        """Return the product with weights [out, in]. `in_scale` [in] is the weight of the norm
        before the product."""
        return _CLASSES[self](weight, bias, in_scale)


class _Native:
    def __init__(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> None:
        self._weight, self._bias, self._in_scale = weight, bias, in_scale

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        if self._in_scale is not None:
            x = x * self._in_scale
        x = x.to(self._weight.dtype)
        if rows == 1 and self._bias is None:  # faster for half precision on CPUs
            return torch.mv(self._weight, x.view(-1)).float().view(1, -1)
        return F.linear(x, self._weight, self._bias).float()


class _Packed:
    """MKL's packed product, with `in_scale` folded into the weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> None:
        wide = weight.float() if in_scale is None else weight.float() * in_scale
        self._packed = pack(wide)
        self._product = torch.ops.mkl._mkl_linear.default
        # MKL reads only the shape of this tensor if the packed row count fits.
        self._shape_only = wide.new_empty(1).expand(weight.shape)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        y: Tensor = self._product(x, self._packed, self._shape_only, self._bias, rows)
        return y


_CLASSES: dict[Kind, Callable[[Tensor, Tensor | None, Tensor | None], Product]] = {
    Kind.NATIVE: _Native,
    Kind.PACKED: _Packed,
    Kind.COMPILED: CompiledProduct,
}


def pack(weight: Tensor) -> Tensor:
    """Return fp32 weights [out, in] in MKL's packed layout."""
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    return packed


@functools.lru_cache(maxsize=1)
def packing_available() -> bool:
    """Return whether this torch has MKL's packed product, with correct results."""
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return False
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=gen)
    x = torch.randn(33, 64, generator=gen)
    try:
        product, expected = Kind.PACKED.of(weight, None, None), x @ weight.T
        return all(
            torch.allclose(product(x[:n], n), expected[:n], atol=1e-4) for n in (1, 7, 8, 33)
        )
    except (RuntimeError, AttributeError):
        return False
