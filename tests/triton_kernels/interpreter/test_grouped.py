"""The products of a mixture of experts, compared with torch; rows alone, among others and
elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.gpu.experts import ExpertsForward
from cbatch.runtime.gpu.products import InvariantDense
from cbatch.runtime.model.records import Experts
from tests.triton_kernels.interpreter.test_quantised import packed
from triton_kernels.products.dense import keeps_bits
from triton_kernels.products.grouped import (
    ExpertGate,
    GroupedTile,
    Matrices,
    combine,
    grouped,
    grouped_reference,
    route,
    route_reference,
    sort_pairs,
)

pytestmark = pytest.mark.usefixtures("device", "unchecked_sums")

EXPERTS, CHOICES = 5, 3


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_routes_are_those_of_torch(normalized: bool, shared: bool, sigmoid: bool) -> None:
    """The first of equal scores wins; a row of NaN stays NaN and names valid experts."""
    scores = noise(9, EXPERTS + shared)
    scores[1, :EXPERTS] = scores[2, 3] = 0.5
    how: dict[str, Any] = {"normalized": normalized, "shared": shared}
    if sigmoid:
        how |= {"sigmoid": True, "bias": torch.tensor([1.0, 0, 0, 0, 0]), "scale": 1.5}
    chosen, weights = route(scores, CHOICES, **how)
    expected = route_reference(scores, CHOICES, **how)
    assert torch.equal(chosen, expected[0]) and chosen[1].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights, expected[1])
    scores[4] = torch.nan
    among, others = route(scores, CHOICES, **how)
    assert others[4].isnan().all() and ((among >= 0) & (among < EXPERTS)).all()
    kept = torch.arange(9) != 4
    assert torch.equal(among[kept], chosen[kept]) and torch.equal(others[kept], weights[kept])


@pytest.mark.parametrize("rows", [1, 40, 700])
def test_pairs_are_sorted_and_cut_into_tiles_of_an_expert(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, 4, (rows, CHOICES), generator=generator)
    chosen = torch.where(chosen == 2, 4, chosen).int()  # no row chooses expert 2
    order, tiles, (num_tiles,) = sort_pairs(chosen, EXPERTS, 16)
    flat = chosen.flatten()
    assert torch.equal(order, flat.sort(stable=True).indices.int())
    assert num_tiles <= tiles.shape[1]
    places = []
    for expert, start, end in tiles[:, :num_tiles].t().tolist():
        assert 0 < end - start <= 16 and (flat[order[start:end].long()] == expert).all()
        places += range(start, end)
    assert places == list(range(chosen.numel()))


def matrices(kind: str, outs: int, columns: int, biased: bool, dtype: torch.dtype) -> Matrices:
    bias = noise(EXPERTS * outs, seed=3).to(dtype) if biased else None
    if kind == "dense":
        return Matrices(noise(EXPERTS * outs, columns, seed=2).to(dtype), bias)
    return Matrices(packed(kind, EXPERTS * outs, columns)[0], bias)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("kind", "dtype", "outs", "columns", "gate"),
    [
        ("dense", FP32, 70, 96, None),
        ("dense", FP32, 70, 40, ExpertGate("silu")),
        ("dense", BF16, 140, 72, ExpertGate("gelu_tanh")),
        ("dense", BF16, 64, 64, ExpertGate("clamped", 0.7, 1.702)),
        ("Q4_0", BF16, 70, 128, ExpertGate("relu_squared")),
        ("Q4_1", FP32, 70, 64, None),
        ("Q8_0", BF16, 40, 128, ExpertGate("silu")),
        ("MXFP4", BF16, 70, 128, ExpertGate("clamped", 0.7, 1.702)),
        ("MXFP4", FP32, 40, 64, None),
    ],
)
def test_products_are_those_of_torch(
    kind: str, dtype: torch.dtype, outs: int, columns: int, gate: ExpertGate | None
) -> None:
    """With a gate, the rows of x are those of tokens; without, of pairs."""
    weight = matrices(kind, outs, columns, gate is not None, dtype)
    chosen = route(noise(50, EXPERTS), CHOICES, normalized=True)[0]
    tile = GroupedTile.of(dtype, weight.weight)
    x = noise(len(chosen) * (1 if gate else CHOICES), columns, seed=4).to(dtype)
    y = grouped(x, weight, sort_pairs(chosen, EXPERTS, tile.rows), EXPERTS, tile, gate)
    expected = grouped_reference(x, weight, chosen, EXPERTS, gate)
    rounding = 8e-3 if dtype == BF16 else 1e-5
    torch.testing.assert_close(y, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("kind", ["dense", "MXFP4"])
def test_rows_keep_their_bits(kind: str) -> None:
    router, gate_up, down = (
        noise(64, EXPERTS, seed=5),
        matrices(kind, 128, 64, True, BF16),
        matrices(kind, 64, 64, False, BF16),
    )
    tile = GroupedTile.of(BF16, gate_up.weight)

    def product(x: Tensor) -> Tensor:
        scores = (x.float()[:, :, None] * router).sum(1)
        chosen, weights = route(scores, CHOICES, normalized=False)
        pairs = sort_pairs(chosen, EXPERTS, tile.rows)
        inner = grouped(x, gate_up, pairs, EXPERTS, tile, ExpertGate("silu"))
        return combine(grouped(inner, down, pairs, EXPERTS, tile), weights)

    assert keeps_bits(product, noise(70, 64).to(BF16))


@pytest.mark.parametrize("kinds", [("Q4_0", "dense"), ("dense", "Q4_0")])
def test_products_of_different_kinds_share_their_pairs(kinds: tuple[str, str]) -> None:
    """In fp32 a stored matrix has larger tiles than a plain one; most rows choose one expert."""
    gate_up, down = (
        matrices(k, *n, False, FP32) for k, n in zip(kinds, [(128, 64), (64, 64)], strict=True)
    )
    record = Experts(count=EXPERTS, chosen=1, inner=64)
    router = InvariantDense(noise(EXPERTS, 64, seed=5), torch.tensor([90.0, 0, 0, 0, 0]))
    x = noise(70, 64)
    y = ExpertsForward(record, router, None, gate_up, down)(x)
    chosen = torch.zeros(70, 1, dtype=torch.int32)
    inner = grouped_reference(x, gate_up, chosen, EXPERTS, ExpertGate("silu"))
    expected = grouped_reference(inner, down, chosen, EXPERTS)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_results_are_summed_with_the_shared_expert() -> None:
    results, weights, shared = noise(8, 40), noise(4, 3, seed=2), noise(4, 40, seed=3)
    expected = (weights[:, :2, None] * results.view(4, 2, 40)).sum(1) + weights[:, 2:] * shared
    torch.testing.assert_close(combine(results, weights, shared), expected)
    pairs = sort_pairs(torch.zeros(4, 2, dtype=torch.int32), 2, 16)
    for x, width in ((noise(3, 40), 40), (noise(4, 32), 40)):
        with pytest.raises(ValueError, match="x: "):
            grouped(x, Matrices(noise(8, width), None), pairs, 2, GroupedTile(16, 16, 16, 1, 1))
