from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cbatch.runtime import linear
from cbatch.runtime.linear import NO_PADDING, Linear, Plan, RowPadding, find_padding, make_plan
from cbatch.runtime.products import Kind
from tests.runtime.marks import needs_compiler, needs_packing

CPU = torch.device("cpu")
PACKED = pytest.param(Kind.PACKED, marks=needs_packing)
COMPILED = pytest.param(Kind.COMPILED, marks=needs_compiler)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    y = (x if scale is None else x * scale).double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("kind", [Kind.NATIVE, PACKED, COMPILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [NO_PADDING, RowPadding(8, 8)])
def test_values(kind: Kind, dtype: torch.dtype, padding: RowPadding) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    scale = torch.rand(64) + 0.5
    product = Linear(weight, bias, scale, Plan.of_one(kind, padding, True))
    for rows in (1, 2, 9, 33):
        x = torch.randn(rows, 64)
        y = product(x)
        tolerance = 0.2 if kind is Kind.NATIVE and dtype == torch.bfloat16 else 1e-4
        assert y.shape == (rows, 96) and y.dtype == torch.float32
        torch.testing.assert_close(
            y.double(), reference(x, weight, bias, scale), rtol=0, atol=tolerance
        )


@needs_packing
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 96)])
def test_single_rows_may_read_transposed_weights(bias: Tensor | None) -> None:
    torch.manual_seed(0)
    weight, scale = torch.randn(96, 64).bfloat16(), torch.rand(64) + 0.5
    bias = None if bias is None else bias.bfloat16()
    plan = Plan(Kind.TRANSPOSED, 1, Kind.PACKED, NO_PADDING, False)
    product = Linear(weight, bias, scale, plan)
    for rows, tolerance in ((1, 0.2), (5, 1e-4)):
        x = torch.randn(rows, 64)
        expected = reference(x, weight, bias, scale)
        torch.testing.assert_close(product(x).double(), expected, rtol=0, atol=tolerance)


def test_transposed_weights_are_for_single_rows_only() -> None:
    native, packed, compiled = Kind.NATIVE, Kind.PACKED, Kind.COMPILED
    wins_once = {native: (1.0, 3.0, 3.0, 3.0), packed: (2.0, 2.0, 2.0, 2.0)}
    assert linear._fast_plan(wins_once, 0.5)[:3] == (Kind.TRANSPOSED, 1, packed)
    assert linear._fast_plan(wins_once, 1.5)[:3] == (native, 1, packed)
    wins_twice = {native: (1.0, 1.0, 3.0, 3.0), packed: (2.0, 2.0, 2.0, 2.0)}
    assert linear._fast_plan(wins_twice, 0.5)[:3] == (native, 2, packed)
    never = {compiled: (3.0,) * 4, packed: (2.0,) * 4}
    assert linear._fast_plan(never, 0.5)[:3] == (Kind.TRANSPOSED, 1, packed)
    assert linear._fast_plan(never, 2.5).most_few == 0


@needs_packing
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(192, 64), (64, 96), (128, 128), (199, 64)])
def test_invariant_plans_keep_their_word(
    threads: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.set_num_threads(threads)
    plan = make_plan(shape, dtype, CPU, invariant=True, may_pack=True)
    assert plan.invariant and plan.most_few == 0
    torch.manual_seed(1)
    product = Linear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype), None, plan)
    x = torch.randn(200, shape[1])
    whole = product(x)
    for start in (0, 1, 7):
        for rows in [*range(1, 41), 64, 150]:
            assert torch.equal(product(x[start : start + rows]), whole[start : start + rows])


def test_the_least_padding_that_holds_is_found() -> None:
    """A product whose bits change below 5 rows, and one that changes at all but multiples of 8."""

    def wrong_if(bad: Callable[[int], bool]) -> Callable[[Tensor], Tensor]:
        return lambda x: x + float(bad(len(x)))

    assert find_padding(wrong_if(lambda n: False), (4, 4), CPU) == NO_PADDING
    assert find_padding(wrong_if(lambda n: n < 5), (4, 4), CPU) == RowPadding(8, 1)
    assert find_padding(wrong_if(lambda n: n % 8 != 0), (4, 4), CPU) == RowPadding(8, 8)


def test_no_padding_is_said_so() -> None:
    calls = iter(range(10**6))
    assert find_padding(lambda x: x + float(next(calls)), (4, 4), CPU) is None


def test_rows_are_padded_to_the_minimum_then_to_multiples() -> None:
    assert [RowPadding(2, 1).rows(n) for n in (1, 2, 3)] == [2, 2, 3]
    assert [RowPadding(8, 8).rows(n) for n in (1, 8, 9)] == [8, 8, 16]


def test_fast_plans_take_the_fastest_at_each_row_count() -> None:
    native, packed, compiled = Kind.NATIVE, Kind.PACKED, Kind.COMPILED
    times = {
        compiled: (1.0, 1.1, 2.0, 9.0),
        packed: (4.0, 4.0, 4.0, 4.0),
        native: (0.9, 3.0, 6.0, 12.0),
    }
    plan = linear._fast_plan(times, float("inf"))
    assert plan[:3] == (compiled, 8, packed) and plan.times_s == (1.0, 1.1, 2.0, 4.0)
    plan = linear._fast_plan({compiled: (1.0,) * 4, native: (2.0,) * 4}, float("inf"))
    assert plan[:3] == (compiled, 0, compiled)


@needs_packing
def test_plans_are_timed() -> None:
    plan = make_plan((64, 64), torch.bfloat16, CPU, invariant=False, may_pack=True)
    assert len(plan.times_s) == len(linear.TIMED_ROWS)


@pytest.mark.parametrize("invariant", [False, True])
def test_without_memory_for_a_copy_nothing_is_packed(invariant: bool) -> None:
    plan = make_plan((64, 64), torch.float32, CPU, invariant=invariant, may_pack=False)
    assert Kind.PACKED not in (plan.few, plan.many)


@pytest.mark.parametrize("invariant", [False, True])
def test_an_odd_number_of_columns_is_not_compiled(invariant: bool) -> None:
    plan = make_plan((64, 47), torch.float32, CPU, invariant=invariant, may_pack=False)
    assert (plan.few, plan.many) == (Kind.NATIVE, Kind.NATIVE)
