"""Operations on rows, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cbatch.runtime.cpu.compiled import CompiledProduct
from cbatch.runtime.cpu.compiled.rows import Rotary, RowNorm
from tests.runtime.marks import needs_compiler
from tests.runtime.test_block_products import stored, whole

pytestmark = needs_compiler

LONG = 3000  # rows: several threads share them


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_norms(width: int, offset: float) -> None:
    x, weight = drawn(1, LONG, width) * 0.02, drawn(width, seed=1)
    expected = x / (x.double().pow(2).mean(-1, keepdim=True) + 1e-4).sqrt()
    found = RowNorm(weight, 1e-4, offset)(x)
    torch.testing.assert_close(found.double(), expected * (weight + offset), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(RowNorm(None, 1e-4)(x).double(), expected, rtol=1e-5, atol=1e-6)
    for rows in (slice(0, 1), slice(5, 18)):
        assert torch.equal(RowNorm(weight, 1e-4, offset)(x[:, rows]), found[:, rows])
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(RowNorm(weight, 1e-4, offset)(turned), found)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    first, second = x[..., :turned].chunk(2, dim=-1)
    halves = x[..., :turned] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([halves, x[..., turned:]], dim=-1)


@pytest.mark.parametrize("turned", [16, 10])
@pytest.mark.parametrize("rows", [1, 5, LONG])
def test_rotary(rows: int, turned: int) -> None:
    """Of heads and rows in either order, all of their dimensions or the first."""
    cos, sin = drawn(1, rows, turned, seed=2), drawn(1, rows, turned, seed=3)
    queries, keys = drawn(1, rows, 4, 16).transpose(1, 2), drawn(1, 2, rows, 16, seed=1)
    for found, x in zip(Rotary()(queries, keys, cos, sin), (queries, keys), strict=True):
        assert found.shape == x.shape
        torch.testing.assert_close(found, rotated(x, cos, sin), rtol=1e-5, atol=1e-6)
    some = slice(rows // 2, rows // 2 + 1)
    part = Rotary()(queries[:, :, some], keys[:, :, some], cos[:, some], sin[:, some])
    whole_of = Rotary()(queries, keys, cos, sin)
    assert all(torch.equal(a, b[:, :, some]) for a, b in zip(part, whole_of, strict=True))


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match="rows of 5"):
        RowNorm(torch.ones(4), 1e-5)(torch.ones(2, 5))
    q, cos = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 8)
    for queries, keys, c, s in (
        (q, q[:, :, :2], cos, cos),
        (q, q, cos[:, :2], cos[:, :2]),
        (q, q, cos, cos[..., :4]),
        (q.double(), q, cos, cos),
        (q, q, torch.zeros(3, 10), torch.zeros(3, 10)),
    ):
        with pytest.raises(ValueError, match="rotary"):
            Rotary()(queries, keys, c, s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_beside_each_other(dtype: torch.dtype) -> None:
    """With and without a bias, as wide as no panel is."""
    first, second, third = drawn(20, 33).to(dtype), drawn(7, 33).to(dtype), drawn(40, 33).to(dtype)
    parts = [CompiledProduct(first, None, None), CompiledProduct(second, drawn(7), None)]
    parts.append(CompiledProduct(third, None, None))
    x = drawn(9, 33, seed=4)
    expected = torch.cat([each(x, 9) for each in parts], dim=1)
    assert torch.equal(CompiledProduct.beside(parts)(x, 9), expected)


def test_products_of_blocks_beside_each_other() -> None:
    parts = [whole(stored(name)[0]) for name in ("Q4_K", "Q6_K")]
    x = drawn(3, parts[0].shape[1])
    expected = torch.cat([each(x, 3) for each in parts], dim=1)
    assert torch.equal(CompiledProduct.beside(parts)(x, 3), expected)
    dense = CompiledProduct(drawn(5, parts[0].shape[1]), None, None)
    with pytest.raises(ValueError, match="taken as"):
        CompiledProduct.beside([parts[0], dense])
    with pytest.raises(ValueError, match="columns"):
        CompiledProduct.beside([dense, CompiledProduct(drawn(5, 4), None, None)])
