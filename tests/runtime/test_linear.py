"""Products with constant weights: the values of each kind, which kinds keep a row's bits, and the
choice of a kind.

The rule that prefers our own products is tested on descriptions of other machines.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct, compiles
from cbatch.runtime.cpu import linear
from cbatch.runtime.cpu.linear import (
    NO_PADDING,
    Linear,
    Machine,
    ProductPlan,
    RowPadding,
    find_padding,
    kinds_for,
    make_plan,
)
from cbatch.runtime.cpu.products import Kind
from tests.runtime.marks import needs_compiler, needs_packing

PACKED = pytest.param(Kind.PACKED, marks=needs_packing)
COMPILED = pytest.param(Kind.COMPILED, marks=needs_compiler)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.mark.parametrize("kind", [Kind.NATIVE, PACKED, COMPILED])
@pytest.mark.parametrize("shape", [(1, 1), (47, 96), (49, 31), (5000, 47)])
@EVERY_DTYPE
def test_values(kind: Kind, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every number of rows of a tile is tested, with and without a scale, a bias and padding."""
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=gen).to(dtype)
    rounds = kind is Kind.NATIVE and dtype == torch.bfloat16
    own = kind is Kind.COMPILED and dtype == torch.bfloat16
    for bias, scale, padding in (
        (None, None, NO_PADDING),
        (torch.randn(shape[0], generator=gen).to(dtype), None, RowPadding(8, 8)),
        (torch.randn(shape[0], generator=gen).to(dtype), torch.rand(shape[1]) + 0.5, NO_PADDING),
    ):
        product = Linear(weight, bias, scale, ProductPlan(kind, padding, True))
        for rows in (1, 2, 3, 4, 5, 8, 9, 23):
            x = torch.randn(rows, shape[1], generator=gen)
            scaled = x if scale is None else x * scale
            out = product(x)
            assert out.shape == (rows, shape[0]) and out.dtype == torch.float32
            # Our own product rounds rows if the processor multiplies bf16, but no result.
            taken = [scaled, scaled.bfloat16()] if own else [scaled]
            exact = [y.double() @ weight.double().T for y in taken]
            exact = exact if bias is None else [y + bias.double() for y in exact]
            assert min((out - y).abs().max() for y in exact) < (0.3 if rounds else 2e-4)


@needs_packing
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(192, 64), (199, 63)])
@EVERY_DTYPE
def test_invariant_plans_keep_their_word(
    compiled: bool,
    threads: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row's bits do not depend on the number of rows, its place, or threads."""
    if not compiled:
        monkeypatch.setattr(linear, "compiles", lambda dtype: False)
    torch.set_num_threads(threads)
    plan = make_plan(shape, dtype, invariant=True, may_pack=True)
    assert plan.invariant
    torch.manual_seed(1)
    product = Linear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype), None, plan)
    x = torch.randn(200, shape[1])
    whole = product(x)
    for count in (threads, 3 - threads) if compiled else (threads,):
        torch.set_num_threads(count)
        for start in (0, 1, 7):
            for rows in [*range(1, 18), 33, 64, 150]:
                some = x[start : start + rows].contiguous()
                assert torch.equal(product(some), whole[start : start + rows])


def test_what_our_own_does_not_compute() -> None:
    assert not compiles(torch.float16)
    with pytest.raises(ValueError, match="weight"):
        CompiledProduct(torch.zeros(8, 48, dtype=torch.float16), None, None)


def test_the_least_padding_that_holds_is_found() -> None:
    """The products change bits never, below 5 rows, except at multiples of 8, and always."""

    def wrong_if(bad: Callable[[int], bool]) -> Callable[[Tensor], Tensor]:
        return lambda x: x + float(bad(len(x)))

    assert find_padding(wrong_if(lambda n: False), (4, 4)) == NO_PADDING
    assert find_padding(wrong_if(lambda n: n < 5), (4, 4)) == RowPadding(8, 1)
    assert find_padding(wrong_if(lambda n: n % 8 != 0), (4, 4)) == RowPadding(8, 8)
    calls = iter(range(10**6))
    assert find_padding(lambda x: x + float(next(calls)), (4, 4)) is None
    assert [RowPadding(8, 8).rows(n) for n in (1, 8, 9)] == [8, 8, 16]


ALL = Machine(compiles=True, packs=True, bf16=True, tiles=True)
PACKS = Machine(compiles=False, packs=True, bf16=False, tiles=False)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("machine", "dtypes", "kind"),
    [
        (ALL._replace(tiles=False), (FP32, BF16), Kind.COMPILED),
        (ALL._replace(tiles=False, bf16=False, packs=False), (FP32, BF16), Kind.COMPILED),
        (ALL, (FP32,), Kind.COMPILED),
        (PACKS, (FP32, BF16, FP16), Kind.PACKED),
        (PACKS._replace(bf16=True), (FP32, FP16), Kind.PACKED),
        (PACKS._replace(packs=False), (FP32, BF16, FP16), Kind.NATIVE),
    ],
)
def test_which_kind_is_preferred(
    machine: Machine, dtypes: tuple[torch.dtype, ...], kind: Kind
) -> None:
    for dtype in dtypes:
        for invariant in (False, True):
            assert kinds_for(dtype, machine, invariant=invariant)[0] is kind


@pytest.mark.parametrize("machine", [ALL, PACKS._replace(bf16=True)])
def test_speed_alone_prefers_what_rounds(machine: Machine) -> None:
    """Tiles in bf16 are preferred, or vectors where our own products are not compiled."""
    assert kinds_for(BF16, machine, invariant=False) == [Kind.NATIVE]
    assert kinds_for(BF16, machine, invariant=True)[0] is not Kind.NATIVE


def test_without_memory_for_a_copy_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "compiles", lambda dtype: False)
    for invariant in (False, True):
        plan = make_plan((64, 64), torch.float32, invariant=invariant, may_pack=False)
        assert plan.kind is Kind.NATIVE
