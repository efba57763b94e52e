"""Patches Triton's interpreter for the odd types, floats that numpy lacks: bf16 and fp8.

The interpreter stores them as integers of their width. Loads, stores and selections are exact. But
arithmetic and `tl.dot` work on these integers, and narrowing casts truncate or carry wrongly. After
`patch()`, casts round to nearest even, and a dot has exact products and an fp32 sum. Before any
other arithmetic kernels convert to fp32, which costs nothing on a GPU. A value beyond the range of
an fp8 type becomes NaN, as in torch, which reveals a missing clamp.

For tests. `TRITON_INTERPRET=1` must be set before triton is first imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def patch() -> None:
    """Patch the interpreter, once. Affects interpreted kernels of this process, not compiled
    ones."""
    builder = InterpreterBuilder
    if getattr(builder, "_patched", False):
        return
    builder._patched = True
    interpreter.InterpretedFunction.__call__ = _call
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _convert(builder.create_fp_to_fp)
    builder.create_dot = _create_dot


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel from another. Triton would patch its language again at each call, which takes
    half of the time; this does so once for each launch."""
    if any(tl.core.is_builtin(each.load) for each in _languages(function.fn)):
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _languages(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the modules of Triton's language that a function uses."""
    seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
    return tuple(value for value in seen if value in (tl, tl.core))


def _is_odd(dtype: Any) -> bool:
    return dtype.scalar.name in _TORCH_DTYPES


def _widened(handle: TensorHandle) -> TensorHandle:
    """Return the same values in fp32, if they have an odd type."""
    if not _is_odd(handle.dtype):
        return handle
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    values = bits.view(_TORCH_DTYPES[handle.dtype.scalar.name]).float().numpy()
    return TensorHandle(values, tl.float32)


def _narrowed(handle: TensorHandle, dtype: Any) -> TensorHandle:
    """Return the nearest values of an odd type, ties to even."""
    values = torch.from_numpy(np.ascontiguousarray(handle.data).astype(np.float32))
    rounded = values.to(_TORCH_DTYPES[dtype.name])
    unsigned = torch.uint16 if rounded.itemsize == 2 else torch.uint8
    return TensorHandle(rounded.view(unsigned).numpy(), dtype)


def _cast(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def cast_impl(self: Any, source: TensorHandle, dtype: Any) -> TensorHandle:
        wide = _widened(source)
        if _is_odd(dtype):
            return _narrowed(wide, dtype.scalar)
        return original(self, wide, dtype)

    return cast_impl


def _convert(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def create_fp_to_fp(self: Any, source: TensorHandle, dtype: Any, mode: Any) -> TensorHandle:
        if _is_odd(source.dtype) or _is_odd(dtype):
            return self.cast_impl(source, dtype)
        return original(self, source, dtype, mode)

    return create_fp_to_fp


def _create_dot(
    _: Any, a: TensorHandle, b: TensorHandle, added: TensorHandle, *__: Any
) -> TensorHandle:
    """Multiply matrices. Each element is one sum over the inner dimension in one order, as in
    matrix units. With a library, a row's bits may depend on its place in the tile."""
    dtype = added.data.dtype
    factors = (_widened(each).data.astype(dtype) for each in (a, b))
    product = np.einsum("...ik,...kj->...ij", *factors, optimize=False)
    return TensorHandle(product + added.data, added.dtype.scalar)
