"""A mixture of experts on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.gpu.products import InvariantDense
from cbatch.runtime.model.records import Experts
from triton_kernels.products.dense import dense
from triton_kernels.products.grouped import (
    ExpertGate,
    GroupedTile,
    Matrices,
    combine,
    grouped,
    route,
    sort_pairs,
)
from triton_kernels.products.quantised import Packed

# A pair's expert, weight, place, and its share of the tiles, of which it may have one to itself.
_PAIR_BYTES = 4 * (3 + 2 * 3)


def bytes_per_token(f: Experts, hidden: int, item_bytes: int) -> int:
    """Return the bytes of a token's activations and scores, and of its pairs in every list."""
    values = f.chosen * (f.inner + hidden) + 3 * f.shared_inner + hidden
    return values * item_bytes + (f.count + 1) * 4 + f.chosen * _PAIR_BYTES


class ExpertsForward:
    """A feed-forward of experts. Its kernels are batch-invariant, the router's included. `shared`
    computes the experts that every token uses; its gate is the last row of the router."""

    def __init__(
        self,
        record: Experts,
        router: InvariantDense,
        correction: Tensor | None,
        gate_up: Matrices,
        down: Matrices,
        shared: Any = None,
    ) -> None:
        self._record, self._router, self._shared = record, router, shared
        self._correction = correction
        self._gate_up, self._down = gate_up, down
        tiles = [GroupedTile.of(router.weight.dtype, each.weight) for each in (gate_up, down)]
        rows = min(tile.rows for tile in tiles)  # both products use the same sorted pairs
        self._tiles = [tile._replace(rows=rows) for tile in tiles]
        self._gate = ExpertGate(record.activation, record.limit, record.alpha)

    @property
    def products(self) -> tuple[Any, ...]:
        return self, *(() if self._shared is None else self._shared.products)

    @property
    def weights(self) -> tuple[Tensor | Packed, ...]:
        return self._router.weight, self._gate_up.weight, self._down.weight

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        f, router = self._record, self._router
        scores = rows.new_empty(len(rows), len(router.weight), dtype=torch.float32)
        dense(rows, router.weight, router.bias, scores)
        has_shared = self._shared is not None
        chosen, weights = route(
            scores,
            f.chosen,
            normalized=f.normalized,
            shared=has_shared,
            sigmoid=f.sigmoid,
            bias=self._correction,
            scale=f.scale,
        )
        tiles = self._tiles
        pairs = sort_pairs(chosen, f.count, tiles[0].rows)
        inner = grouped(rows, self._gate_up, pairs, f.count, tiles[0], self._gate)
        results = grouped(inner, self._down, pairs, f.count, tiles[1])
        return combine(results, weights, self._shared(rows) if has_shared else None, out)
