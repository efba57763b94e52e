"""Builds the groups of a step: the queries that share a product, with their keys and masks."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.cpu.attention.group import (
    LANES,
    MASKED,
    SEGMENT_TOKENS,
    Group,
    GroupShape,
    HeadShape,
    Operands,
    product_rows,
)
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota

SMALL_QUERY_TOKENS = 32  # queries up to this length share products with others
_CACHE_FLOATS = 3 << 17  # fp32 elements of a group's K and V: 1.5 MB, which fit the L2 cache
_CACHED_SHAPES = 32
_ZERO, _MASKED = np.float32(0), np.float32(MASKED)


class StepBuffers(NamedTuple):
    """Buffers that all groups of a step use: they read queries from `fused` [T, row_width] and
    write to `out` [T + 1, heads * head_dim]. `tables` int32 [B, blocks]: entries beyond a context
    are not read."""

    kv: KVCache
    tables: NDArray[np.int32]
    fused: Tensor
    out: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.out) - 1


class GroupBuilder:
    """Builds groups over one KV cache. Operands are cached by shape for later steps."""

    def __init__(self, kv: KVCache, heads: HeadShape) -> None:
        self.kv, self.heads = kv, heads
        self._operands: OrderedDict[GroupShape, Operands] = OrderedDict()

    def width(self, count: int, longest: int, window: int | None, cache_factor: int = 1) -> int:
        """Return the number of contexts per group, so that `count` contexts form groups of similar
        size, each with K and V of at most `cache_factor` times the L2 cache."""
        h = self.heads
        num_keys = longest if window is None else window + SEGMENT_TOKENS
        floats = num_keys * h.kv_heads * 2 * h.head_dim
        max_contexts = max(1, cache_factor * _CACHE_FLOATS // floats)
        return -(-count // -(-count // max_contexts))

    def rows(self, step: StepBuffers, contexts: I64, window: int | None) -> list[Group]:
        """Build groups of single rows, sized so that K and V of each group stay in the L2 cache."""
        h, count = self.heads, len(contexts)
        width = self.width(count, int(contexts.max()), window)
        groups = []
        for start in range(0, count, width):
            stop = min(start + width, count)
            part = contexts[start:stop]
            first_key = _first_keys(self.kv, part, window)
            keys = self._num_keys(part, first_key)
            group = self._group(stop - start, 1, keys, rows_in_place=True)
            mask = additive(seen_by_rows(part, first_key, keys, window))[:, None]
            if len(part) > 1 and h.kv_heads > 1:
                mask = mask.repeat(h.kv_heads, axis=1)
            group.mask = _spread(group, mask.reshape(-1, 1, keys))
            group.gather = self._gather(group, step.tables[start:stop], first_key, part)
            group.bind_rows(step.fused, step.out, start, stop)
            groups.append(group)
        return groups

    def pieces(self, step: StepBuffers, pieces: I64, window: int | None) -> Group:
        """Build one group of pieces, [4, P] (see `AttentionPlanner`)."""
        h = self.heads
        sequences, rows, query_lens, contexts = pieces
        first_key = _first_keys(self.kv, contexts - query_lens + 1, window)
        keys = self._num_keys(contexts, first_key)
        queries = self._padded_queries(int(query_lens.max()))
        group = self._group(len(rows), queries, keys, rows_in_place=False)
        seen = seen_by_queries(queries, query_lens, contexts, first_key, keys, window)
        mask = additive(seen).repeat(h.group, axis=1)
        if len(rows) > 1 and h.kv_heads > 1:
            mask = mask.repeat(h.kv_heads, axis=0)
        group.mask = _spread(group, mask)
        group.gather = self._gather(group, step.tables[sequences], first_key, contexts)
        self._bind(group, step, rows, query_lens, queries)
        return group

    def _padded_queries(self, query_len: int) -> int:
        min_rows = max(self._product_rows())
        return max(query_len, -(-min_rows // self.heads.group))

    def _product_rows(self) -> tuple[int, int]:
        return product_rows(self.heads.head_dim, torch.get_num_threads())

    def _num_keys(self, contexts: I64, first_key: I64) -> int:
        tile = math.lcm(LANES, self.kv.block_size)
        return -(-int((contexts - first_key).max()) // tile) * tile

    def _group(self, count: int, queries: int, keys: int, *, rows_in_place: bool) -> Group:
        """Return a group of `count` pieces. Operands of the same shape are shared with other
        groups, which run one after another."""
        h = self.heads
        rows = queries * h.group
        query_rows = value_rows = rows
        if rows_in_place:
            min_rows = self._product_rows()
            value_rows = max(rows, min_rows[1])
            query_rows = max(value_rows, min_rows[0])
        pairs = count * h.kv_heads
        shape = GroupShape(2 if pairs == 1 else pairs, query_rows, value_rows, keys)
        operands = self._operands.get(shape)
        if operands is None:
            if len(self._operands) >= _CACHED_SHAPES:
                self._operands.popitem(last=False)
            operands = self._operands[shape] = Operands(shape, h, self.kv)
        else:
            self._operands.move_to_end(shape)
        return Group(operands, h)

    def _gather(
        self, group: Group, tables: NDArray[np.int32], first_key: I64, contexts: I64
    ) -> Tensor:
        kv, h, shape = self.kv, self.heads, group.operands.shape
        size = kv.block_size
        index = first_key[:, None] // size + iota(shape.keys // size)
        if index.shape[1] > tables.shape[1] or first_key.any():
            known = np.take_along_axis(tables, np.minimum(index, tables.shape[1] - 1), axis=1)
        else:
            known = tables[:, : index.shape[1]]
        blocks = np.where(index * size < contexts[:, None], known, kv.scratch_block)
        gather = (blocks[:, None, :] + kv.head_base[:, None]).reshape(-1)
        copies = shape.pairs // (len(contexts) * h.kv_heads)
        if copies > 1:
            gather = np.tile(gather, copies)
        return torch.from_numpy(gather)

    def _bind(
        self, group: Group, step: StepBuffers, rows: I64, query_lens: I64, queries: int
    ) -> None:
        copies = group.operands.shape.pairs // (len(rows) * self.heads.kv_heads)
        pack, unpack = (
            torch.from_numpy(np.tile(units, copies))
            for units in self._unit_index(rows, query_lens, queries, step.num_rows)
        )
        group.bind_pieces(step.fused, step.out, pack, unpack)

    def _unit_index(self, rows: I64, query_lens: I64, queries: int, spare: int) -> tuple[I64, I64]:
        """Return which (token, KV head) unit each (piece, KV head, query) reads, and which unit it
        writes. Padding reads unit 0 and writes row `spare`."""
        kv_heads = self.heads.kv_heads
        units = (rows[:, None] + iota(queries)) * kv_heads
        real = (iota(queries) < query_lens[:, None])[:, None]
        units = units[:, None] + iota(kv_heads)[:, None]
        read = np.where(real, units, 0)
        write = np.where(real, units, spare * kv_heads)
        return read.reshape(-1), write.reshape(-1)


def _spread(group: Group, mask: NDArray[np.float32]) -> Tensor:
    """Broadcast a mask [pairs or 1, rows or 1, keys] to a group's scores, sharing memory."""
    return torch.from_numpy(mask).expand(group.operands.scores.shape)


def _first_keys(kv: KVCache, contexts: I64, window: int | None) -> I64:
    """Return the first position to gather, for a first query at `contexts - 1`: 0, or a segment
    boundary at or before the first key in the window."""
    if window is None:
        return np.zeros_like(contexts)
    step = math.lcm(SEGMENT_TOKENS, kv.block_size)
    return np.maximum(contexts - window, 0) // step * step


def additive(seen: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return a mask: 0 where a query sees a key, a large finite negative number elsewhere."""
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
