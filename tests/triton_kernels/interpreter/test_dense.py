"""The product whose rows keep their bits, compared with torch; rows alone, among others and
elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from triton_kernels.products import dense as module
from triton_kernels.products.dense import (
    ProductTile,
    dense,
    dense_reference,
    keeps_bits,
    tile_of,
)

pytestmark = pytest.mark.usefixtures("device", "unchecked_sums")


def operands(rows: int, outs: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outs)
    x = torch.randn(rows, columns, generator=generator)
    return x.to(dtype), torch.randn(outs, columns, generator=generator).to(dtype)


@pytest.mark.parametrize(
    "dtype, rows, outs, columns",
    [
        (torch.bfloat16, 67, 33, 200),
        (torch.float32, 1, 70, 96),
        (torch.float32, 67, 33, 200),
        (torch.float16, 130, 64, 64),
    ],
)
def test_products_are_those_of_torch(
    dtype: torch.dtype, rows: int, outs: int, columns: int
) -> None:
    x, weight = operands(rows, outs, columns, dtype)
    bias = weight[:, 0].contiguous() if rows == 67 else None
    out = torch.full((rows, outs + 16), 7.0, dtype=dtype)
    dense(x, weight, bias, out[:, :outs])
    expected = dense_reference(x, weight, bias)
    rounding = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(out[:, :outs], expected, rtol=rounding, atol=rounding * 8)
    assert (out[:, outs:] == 7).all()


@pytest.mark.parametrize("rows, outs, columns", [(1, 70, 96), (67, 33, 200)])
def test_tiles_through_descriptors_give_the_same_bits(rows: int, outs: int, columns: int) -> None:
    """Tiles of any size, by any program, give the same bits: the sum over columns has one order."""
    x, weight = operands(rows, outs, columns, torch.bfloat16)
    bias = weight[:, 0].contiguous() if rows == 67 else None
    expected = torch.empty(rows, outs, dtype=torch.bfloat16)
    dense(x, weight, bias, expected)
    for sizes in ((64, 32), (128, 64)):
        out = torch.full_like(expected, 7.0)
        dense(x, weight, bias, out, ProductTile(*sizes, 64, 4, 3, programs=2))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("parts", [2, 4])
def test_sums_in_parts_have_the_same_bits_apart_and_together(parts: int) -> None:
    """Sums have other bits than without parts. Counters are 0 after each product."""
    x, weight = operands(150, 70, 480, torch.bfloat16)
    bias, together = weight[:, 0].contiguous(), torch.empty(150, 70, dtype=torch.bfloat16)
    dense(x, weight, bias, together, ProductTile(128, 64, 64, 8, 3, 1, parts=parts))
    for first, end in ((0, 1), (5, 6), (61, 130), (0, 150)):
        rows = x[first:end]
        out = torch.full((len(rows), 70), 7.0, dtype=torch.bfloat16)
        dense(rows, weight, bias, out, ProductTile(64, 32, 64, 4, 2, 2, parts=parts, apart=True))
        assert torch.equal(out, together[first:end])
    wide = torch.empty(150, 70, dtype=torch.float32)
    whole, rounding = torch.empty_like(wide), 1e-5
    dense(x, weight, bias, wide, ProductTile(64, 32, 64, 4, 2, 2, parts=parts, apart=True))
    dense(x, weight, bias, whole, ProductTile(64, 32, 64, 4, 2, 2))
    assert not torch.equal(wide, whole)
    torch.testing.assert_close(wide, whole, rtol=rounding, atol=100 * rounding)


def test_parts_depend_on_the_shape_of_the_weight_alone() -> None:
    shapes = {(4096, 4096): 4, (4096, 14336): 4, (6144, 4096): 2, (28672, 4096): 1, (4096, 512): 1}
    for shape, parts in shapes.items():
        for rows in (1, 64, 256, 4000):
            kind = torch.bfloat16, *shape
            tile = tile_of(*kind, described=True, num_rows=rows, has_parts=True)
            assert tile.parts == parts and tile.apart == (parts > 1 and rows < 256)


def product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(weight))
        module.dense(x, weight, None, out)
        return out

    return run


def test_rows_keep_their_bits() -> None:
    x, weight = operands(70, 20, 200, torch.bfloat16)
    assert keeps_bits(product(weight), x)


def test_a_sum_that_follows_the_number_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: few rows are summed in two halves, as a library does that splits columns."""
    real = module.dense

    def split(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if len(x) > 16:
            real(x, weight, bias, out)
            return
        at = weight.shape[1] // 2
        first, second = torch.empty_like(out), torch.empty_like(out)
        real(x[:, :at].contiguous(), weight[:, :at].contiguous(), None, first)
        real(x[:, at:].contiguous(), weight[:, at:].contiguous(), None, second)
        out.copy_(first + second)

    monkeypatch.setattr(module, "dense", split)
    x, weight = operands(70, 20, 200, torch.float32)
    assert not keeps_bits(product(weight), x)
