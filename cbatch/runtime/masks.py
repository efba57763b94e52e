"""Additive masks: 0 where a query sees a key, a large finite negative where it does not."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.attention import MASKED
from cbatch.runtime.index import I64, iota

MOST_POSITION = 8192  # of `CausalMasks`: beyond it the table would be felt
_ZERO, _MASKED = np.float32(0), np.float32(MASKED)


def additive(seen: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(seen, _ZERO, _MASKED)


def seen_by_rows(contexts: I64, first_key: I64, keys: int, window: int | None) -> NDArray[np.bool_]:
    """[pieces, keys]: whether the row at `contexts - 1` sees a key."""
    positions = iota(keys) + first_key[:, None]
    seen: NDArray[np.bool_] = positions < contexts[:, None]
    if window is not None:
        seen &= positions >= contexts[:, None] - window
    return seen


def seen_by_queries(
    queries: int,
    query_lens: I64,
    contexts: I64,
    first_key: I64,
    keys: int,
    window: int | None,
) -> NDArray[np.bool_]:
    """[pieces, queries, keys]: whether a query sees a key."""
    positions = (iota(keys) + first_key[:, None])[:, None, :]
    at = ((contexts - query_lens)[:, None] + iota(queries))[:, :, None]
    seen: NDArray[np.bool_] = positions <= at
    if window is not None:
        seen &= positions > at - window
    return seen


class CausalMasks:
    """Masks of a few consecutive queries of one sequence: views of one table.

    What a query sees depends on its distance to a key alone. In row q * group + g of the table the
    columns up to `origin` + q are open, so a query at position p finds its mask from column
    `origin - p` on.
    """

    _FIRST_ORIGIN = 512

    def __init__(self, most_queries: int, group: int, device: torch.device) -> None:
        self._most_queries, self._group, self._device = most_queries, group, device
        self._origin, self._table = 0, torch.empty(0, 0)

    def of(self, position: int, queries: int, keys: int) -> Tensor:
        """fp32 [queries * group, keys] of queries from `position` on over keys 0 to keys - 1."""
        start = self._origin - position
        if start < 0 or start + keys > self._table.shape[1]:
            self._build(max(self._FIRST_ORIGIN, 2 * position), keys - position)
            start = self._origin - position
        return self._table[: queries * self._group, start : start + keys]

    def _build(self, origin: int, beyond: int) -> None:
        columns = origin + max(self._FIRST_ORIGIN, beyond)
        seen = iota(columns) <= origin + iota(self._most_queries)[:, None]
        table = additive(seen).repeat(self._group, axis=0)
        self._origin, self._table = origin, torch.from_numpy(table).to(self._device)
