"""Additive masks: 0 where a query sees a key, a large finite negative number elsewhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.cpu.attention.group import MASKED
from cbatch.runtime.model.arrays import I64, iota

_ZERO, _MASKED = np.float32(0), np.float32(MASKED)


def additive(seen: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(seen, _ZERO, _MASKED)


def seen_by_rows(contexts: I64, first_key: I64, keys: int, window: int | None) -> NDArray[np.bool_]:
    """Return whether the row at position `contexts - 1` sees each key: bool [pieces, keys]."""
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
    """Return whether each query sees each key: bool [pieces, queries, keys]."""
    positions = (iota(keys) + first_key[:, None])[:, None, :]
    at = ((contexts - query_lens)[:, None] + iota(queries))[:, :, None]
    seen: NDArray[np.bool_] = positions <= at
    if window is not None:
        seen &= positions > at - window
    return seen
