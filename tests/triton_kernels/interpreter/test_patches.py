"""bf16 and fp8 in the patched interpreter, compared with torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def copy_kernel(source_ptr, target_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at).to(target_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    tl.store(out_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def add_kernel(a_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(a_ptr + at) + tl.load(a_ptr + at))


def copied(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.zeros(len(source), dtype=dtype)
    copy_kernel[(1,)](source, target, len(source))
    return target


def wide_values() -> torch.Tensor:
    """Return values of both signs, ties of every narrow type, subnormal ones, and mantissas that
    carry."""
    steps = torch.arange(1024, dtype=torch.float32)
    near_one = 1 + steps / 1024
    return torch.cat([near_one, -near_one * 3, near_one * 2.0**-8, near_one * 2.0**-20])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    values = wide_values()
    narrow = values.to(dtype)
    bits = torch.uint16 if narrow.itemsize == 2 else torch.uint8
    assert torch.equal(copied(values, dtype).view(bits), narrow.view(bits))
    assert torch.equal(copied(narrow, torch.float32), narrow.float())
    assert torch.equal(copied(narrow, torch.float16), narrow.half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
def test_dot_has_exact_products(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 32, 32, generator=gen).to(dtype)
    out = torch.zeros(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    exact = a.double() @ b.double()
    assert (out - exact).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
def test_other_arithmetic_raises(dtype: torch.dtype) -> None:
    a = torch.ones(16)
    add_kernel[(1,)](a, torch.zeros(16), 16)  # fp32 is not affected
    with pytest.raises(Exception, match="convert to fp32 first"):
        add_kernel[(1,)](a.to(dtype), torch.zeros(16, dtype=dtype), 16)
