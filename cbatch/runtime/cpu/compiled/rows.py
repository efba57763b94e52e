"""Operations on rows, a call each: for passes whose other operations are not ours."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_long, c_void_p

import torch
from torch import Tensor

from cbatch.runtime.cpu.compiled.build import library
from cbatch.runtime.cpu.compiled.structs import fields
from cbatch.runtime.cpu.compiled.threads import num_threads

_ALONE_BELOW = 1 << 15  # numbers


class _Rotated(ctypes.Structure):
    """`rotated` of rows.h."""

    _fields_ = [
        *fields(c_void_p, "x y"),
        *fields(c_long, "heads width x_row x_head"),
    ]


class RowNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension, in fp32."""

    def __init__(self, weight: Tensor | None, eps: float, offset: float = 0.0) -> None:
        """Raises ValueError without kernels."""
        self._weight = None if weight is None else weight.detach().float().contiguous()
        self.address = None if self._weight is None else self._weight.data_ptr()
        self.numbers = eps, offset
        self._call = _kernel().norm_rows
        self._call.argtypes = [*(c_void_p,) * 3, *(c_long,) * 3, c_float, c_float, c_long]
        self._call.restype = None

    @property
    def width(self) -> int | None:
        """Of its weight, if it has one."""
        return None if self._weight is None else len(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 of the shape of x, dense."""
        if x.dtype != torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        width = x.shape[-1]
        if self._weight is not None and len(self._weight) != width:
            raise ValueError(f"x: rows of {width} for a weight of {len(self._weight)}")
        y = torch.empty_like(x)
        rows, threads = x.numel() // max(width, 1), _threads(x.numel())
        numbers = self.address, y.data_ptr(), rows, width, width, *self.numbers, threads
        self._call(x.data_ptr(), *numbers)
        return y


class Rotary:
    """Queries and keys rotated by halves: x * cos + [-x2, x1] * sin of the first dimensions."""

    def __init__(self) -> None:
        """Raises ValueError without kernels."""
        self._call = _kernel().rotate_rows
        self._call.argtypes = [*(POINTER(_Rotated),) * 2, *(c_void_p,) * 2, *(c_long,) * 3]
        self._call.restype = None

    def __call__(
        self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """queries fp32 [1, H, T, D], keys [1, Hkv, T, D], cos and sin [1, T, R] or [T, R], R even
        and at most D -> as they came, over memory [T, heads, D]. Raises ValueError for others."""
        rows, width = queries.shape[-2:]
        turned = cos.shape[-1]
        if keys.shape[-2:] != (rows, width) or cos.numel() != rows * turned or turned % 2:
            shapes = [tuple(x.shape) for x in (queries, keys, cos)]
            raise ValueError(f"rotary: queries, keys and cos of {shapes}")
        if sin.shape != cos.shape or turned > width:
            raise ValueError(f"rotary: sin of {tuple(sin.shape)}, cos of {tuple(cos.shape)}")
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        (q, q_struct), (k, k_struct) = _rotated(queries), _rotated(keys)
        threads = _threads(q.numel() + k.numel())
        self._call(q_struct, k_struct, cos.data_ptr(), sin.data_ptr(), rows, turned, threads)
        return q, k


def _rotated(x: Tensor) -> tuple[Tensor, _Rotated]:
    """Where it goes, and the struct, which holds addresses of both: `x` outlives the call."""
    if x.dim() != 4 or x.shape[0] != 1 or x.dtype != torch.float32 or x.stride(3) != 1:
        raise ValueError(f"rotary: {x.dtype} of {tuple(x.shape)}, not fp32 [1, heads, T, D]")
    _, heads, rows, width = x.shape
    y = torch.empty(1, rows, heads, width)
    head, row = x.stride(1), x.stride(2)
    return y.transpose(1, 2), _Rotated(x.data_ptr(), y.data_ptr(), heads, width, row, head)


def _threads(numbers: int) -> int:
    return 1 if numbers < _ALONE_BELOW else num_threads()


def _kernel() -> ctypes.CDLL:
    kernel = library()
    if kernel is None:
        raise ValueError("rows: there are no kernels here")
    return kernel
