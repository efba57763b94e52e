"""Products with constant weights, by our own kernel."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_long, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.runtime.cpu.compiled.build import library

_ALIGNMENT_BYTES = 64
_PANELS_AT_ONCE = 256
_ALONE_BELOW = 1 << 18  # multiplications that one thread does sooner than two get together
_DTYPES = (torch.float32, torch.bfloat16)


class LinearStruct(ctypes.Structure):
    """`linear` of product.h: addresses, which whoever holds it keeps alive."""

    _fields_ = [
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("out", c_long),
        ("in", c_long),
        ("half", c_int),
    ]


class CompiledProduct:
    """y = (x * in_scale) W^T + bias over fp32 rows [T, in], contiguous: fp32 [T, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> None:
        """Raises ValueError where `compiles` says no."""
        kernel = library()
        if kernel is None or not compiles(weight.dtype):
            raise ValueError(f"weight: {weight.dtype} of {tuple(weight.shape)} has no kernel here")
        if in_scale is not None and weight.dtype == torch.float32:
            weight, in_scale = weight * in_scale, None  # bf16 would round it
        self._out, self._in = weight.shape
        # Held, since the kernel is given addresses.
        self._panels = _panels(weight, kernel.lanes())
        self._bias = None if bias is None else bias.float().contiguous()
        self._scale = None if in_scale is None else in_scale.float().contiguous()
        self.struct = LinearStruct(
            self._panels.data_ptr(),
            _address(self._scale),
            _address(self._bias),
            self._out,
            self._in,
            weight.dtype == torch.bfloat16,
        )
        self._call = kernel.product
        self._call.argtypes = [POINTER(LinearStruct), c_void_p, c_void_p, c_long, c_int]

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        y = x.new_empty(rows, self._out)
        alone = rows * self._out * self._in < _ALONE_BELOW
        threads = 1 if alone else torch.get_num_threads()
        if self._call(self.struct, x.data_ptr(), y.data_ptr(), rows, threads):
            raise MemoryError(f"a product of {rows} rows with {self._in} columns")
        return y


def compiles(dtype: torch.dtype) -> bool:
    """Whether the kernel is to be had here, for weights of that type."""
    return dtype in _DTYPES and library() is not None


def _panels(weight: Tensor, lanes: int) -> Tensor:
    """Weights [out, in] as the kernel wants them: [panels, in, lanes]; of bf16 pairs of columns,
    [panels, in / 2, lanes, 2]. The last panel and the last pair are filled up with zeros. Aligned.
    """
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    out, columns = weight.shape[0], weight.shape[1] + weight.shape[1] % pair
    count = -(-out // lanes)
    spare = _ALIGNMENT_BYTES // weight.element_size()
    memory = weight.new_zeros(count * lanes * columns + spare)
    start = -memory.data_ptr() % _ALIGNMENT_BYTES // weight.element_size()
    panels = memory[start : start + count * lanes * columns].view(count, columns // pair, -1, pair)
    for first in range(0, count, _PANELS_AT_ONCE):  # a copy of all at once would need the room
        some = weight[first * lanes : (first + _PANELS_AT_ONCE) * lanes]
        some = F.pad(some, (0, columns - weight.shape[1], 0, -len(some) % lanes))
        paired = some.view(-1, lanes, columns // pair, pair).transpose(1, 2)
        panels[first : first + _PANELS_AT_ONCE].copy_(paired)
    return panels


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
