"""Products with constant weights: their values, and that our own keep a row's bits."""

from __future__ import annotations

import pytest
import torch

from cbatch.runtime.compiled import CompiledProduct, compiles
from cbatch.runtime.cpu.linear import Linear, resolve_numerics
from cbatch.runtime.model.config import ModelError
from tests.runtime.marks import needs_compiler

COMPILED = pytest.param(True, marks=needs_compiler)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.parametrize("compiled", [False, COMPILED])
@pytest.mark.parametrize("shape", [(1, 1), (47, 96), (49, 31), (5000, 47)])
@EVERY_DTYPE
def test_values(compiled: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every number of rows of a tile is tested, with and without a scale and a bias."""
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=gen).to(dtype)
    bias = torch.randn(shape[0], generator=gen).to(dtype)
    for shift, scale in ((None, None), (bias, None), (bias, torch.rand(shape[1]) + 0.5)):
        product = Linear(weight, shift, scale, compiled=compiled)
        for rows in (1, 2, 3, 4, 5, 8, 9, 23):
            x = torch.randn(rows, shape[1], generator=gen)
            scaled = x if scale is None else x * scale
            out = product(x)
            assert out.shape == (rows, shape[0]) and out.dtype == torch.float32
            # Our own product rounds rows if the processor multiplies bf16, but no result.
            taken = (
                [scaled, scaled.bfloat16()] if compiled and dtype is not torch.float32 else [scaled]
            )
            exact = [y.double() @ weight.double().T for y in taken]
            exact = exact if shift is None else [y + shift.double() for y in exact]
            rounds = not compiled and dtype == torch.bfloat16
            assert min((out - y).abs().max() for y in exact) < (0.3 if rounds else 2e-4)


@needs_compiler
@pytest.mark.parametrize("shape", [(192, 64), (199, 63)])
@EVERY_DTYPE
def test_rows_keep_their_bits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """A row's bits do not depend on the number of rows, its place, or threads."""
    torch.manual_seed(1)
    product = Linear(torch.randn(shape).to(dtype), torch.randn(shape[0]), None, compiled=True)
    x = torch.randn(200, shape[1])
    whole = product(x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start in (0, 1, 7):
            for rows in [*range(1, 18), 33, 64, 150]:
                some = x[start : start + rows].contiguous()
                assert torch.equal(product(some), whole[start : start + rows])


def test_what_our_own_does_not_compute() -> None:
    assert not compiles(torch.float16)
    with pytest.raises(ValueError, match="weight"):
        CompiledProduct(torch.zeros(8, 48, dtype=torch.float16), None, None)


def test_float16_sums_do_not_overflow() -> None:
    weight = torch.full((1, 64), 40.0, dtype=torch.float16)
    assert Linear(weight, None, None, compiled=False)(torch.full((1, 64), 60.0)) == 153_600


def test_only_our_kernels_are_invariant() -> None:
    fp32, half = torch.float32, torch.float16
    assert resolve_numerics("auto", fp32, compiled=True) == "invariant"
    assert resolve_numerics("auto", fp32, compiled=False) == "fast"
    assert resolve_numerics("fast", fp32, compiled=True) == "fast"
    with pytest.raises(ModelError, match="numerics: 'invariant' needs compiled kernels; install"):
        resolve_numerics("invariant", fp32, compiled=False)
    with pytest.raises(ModelError, match="not supported in float16; set dtype to bfloat16 or"):
        resolve_numerics("invariant", half, compiled=False)
