"""Lays out the attention of a step: index arithmetic done once, for all layers of one window."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.attention import (
    LANES,
    MASKED,
    SEGMENT_TOKENS,
    Group,
    GroupShape,
    HeadShape,
    Operands,
    product_rows,
)
from cbatch.runtime.config import ModelConfig
from cbatch.runtime.kv import KVCache

I64 = NDArray[np.int64]

_CHUNK_TOKENS = 128  # longer queries are cut at multiples of this; none meets keys of its future
_SMALL_QUERY_TOKENS = 32  # queries up to this length share products with others
_MAX_SCORES = 1 << 24  # elements of one score buffer
_MAX_WASTE = 1 << 18  # padded scores that are cheaper than one more group
_CACHE_FLOATS = 3 << 17  # gathered K and V of one group: 1.5 MB, so that products find them in L2
_CACHED_SHAPES = 32
_ZERO, _MASKED = np.float32(0), np.float32(MASKED)

_iota = np.arange(4096)


def iota(n: int) -> I64:
    """0..n-1, a view of one shared array."""
    global _iota
    if n > len(_iota):
        _iota = np.arange(2 * n)
    return _iota[:n]


class RowMask(NamedTuple):
    """Mask of the single rows [start, stop) of a step, `values` [rows, kv_heads or 1, keys], whose
    memory a group's mask shares."""

    start: int
    stop: int
    values: NDArray[np.float32]


class StepLayout:
    """Index arithmetic of one step: `slots` [T * kv_heads], the rows of `kv.token_rows` that take
    K and V of each (token, KV head), and the attention groups of each window."""

    def __init__(self, slots: I64, device: torch.device) -> None:
        self._slots = slots
        self.slots = torch.from_numpy(slots).to(device)
        self.groups: dict[int | None, list[Group]] = {}

    def keep(
        self,
        masks: list[RowMask],
        contexts: I64,
        tables: NDArray[np.int32],
        block_size: int,
        most_keys: int | None,
    ) -> None:
        """What `advance` needs; no context may grow beyond `most_keys`."""
        self._masks, self._contexts, self._tables = masks, contexts, tables.copy()
        self._block_size, self._most_keys = block_size, most_keys

    def advance(self, contexts: I64, tables: NDArray[np.int32]) -> bool:
        """Become the layout of the next token of every sequence, if that is what is asked for and
        each stays within its block: a few numbers change, nothing is rebuilt."""
        if len(contexts) != len(self._contexts) or (contexts != self._contexts + 1).any():
            return False
        index = (contexts - 1) // self._block_size
        if (index * self._block_size == contexts - 1).any():
            return False
        width = int(index.max()) + 1
        if not np.array_equal(tables[:, :width], self._tables[:, :width]):
            return False
        if self._most_keys is not None and int(contexts.max()) > self._most_keys:
            return False
        self._contexts = contexts
        self._slots += 1
        for mask in self._masks:
            rows = iota(mask.stop - mask.start)
            mask.values[rows, :, contexts[mask.start : mask.stop] - 1] = 0
        return True


class AttentionPlanner:
    """Forms groups that together cover every row of a step once.

    Pieces of a group: int64 [4, P], in rows the sequence, its first flat row, the number of rows,
    and the context (the last row stands at position context - 1).
    """

    def __init__(self, config: ModelConfig) -> None:
        self.heads = HeadShape.of(config)
        self._windows = sorted(set(config.sliding_window), key=lambda w: w or 0)
        self._operands: OrderedDict[GroupShape, Operands] = OrderedDict()
        self._kv: KVCache | None = None
        self._last: StepLayout | None = None  # one that can be advanced
        self._bound: tuple[object, ...] = ()  # the cache and the buffers of its groups
        self._masks: list[RowMask] = []

    def plan(
        self,
        kv: KVCache,
        query_lens: I64,
        contexts: I64,
        positions: Tensor,
        tables: NDArray[np.int32],
        fused: Tensor,
        out: Tensor,
    ) -> StepLayout:
        """Layout of a step whose queries stand in `fused` [T, row_width], and whose results go to
        `out` [T + 1, heads * head_dim]. `tables` [B, blocks]: entries beyond a context are not
        read."""
        buffers = (kv, fused, out)
        if (
            self._last is not None
            and len(contexts) == len(out) - 1
            and all(map(operator.is_, self._bound, buffers))
            and self._last.advance(contexts, tables)
        ):
            return self._last
        if self._kv is not kv:
            self._kv = kv
            self._operands.clear()
        device = kv.data.device
        slots = _token_slots(kv, query_lens, positions.cpu().numpy(), tables)
        layout = StepLayout(slots, device)
        longest = int(contexts.max())
        # A window that no context has outgrown is no window.
        reached = {w: w if w is not None and longest > w else None for w in self._windows}
        self._masks = []
        groups = {
            window: self._groups(kv, query_lens, contexts, tables, window, fused, out)
            for window in sorted(set(reached.values()), key=lambda w: w or 0)
        }
        layout.groups = {window: groups[reached[window]] for window in self._windows}
        self._last = None
        if self._masks and set(groups) == {None} and device.type == "cpu":
            most_keys = min((w for w in self._windows if w is not None), default=None)
            layout.keep(self._masks, contexts, tables, kv.block_size, most_keys)
            self._last, self._bound = layout, buffers
        return layout

    def _groups(
        self,
        kv: KVCache,
        query_lens: I64,
        contexts: I64,
        tables: NDArray[np.int32],
        window: int | None,
        fused: Tensor,
        out: Tensor,
    ) -> list[Group]:
        if len(contexts) == len(out) - 1:  # one row each
            if not self._wasteful(contexts, int(contexts.max())):
                return self._row_groups(kv, contexts, tables, window, fused, out)
            starts = iota(len(contexts))
        else:
            starts = query_lens.cumsum() - query_lens
        pieces = self._pieces(query_lens, contexts, starts)
        return [
            self._piece_group(kv, part, tables, window, fused, out)
            for part in self._partition(pieces)
        ]

    def _wasteful(self, contexts: I64, longest: int) -> bool:
        padded = longest * len(contexts) - int(contexts.sum())
        return padded * self.heads.kv_heads * 8 > _MAX_WASTE

    def _row_groups(
        self,
        kv: KVCache,
        contexts: I64,
        tables: NDArray[np.int32],
        window: int | None,
        fused: Tensor,
        out: Tensor,
    ) -> list[Group]:
        """Single rows, as many in a group as keep its K and V in the nearest caches."""
        h = self.heads
        keys_held = int(contexts.max()) if window is None else window + SEGMENT_TOKENS
        most = max(1, _CACHE_FLOATS // (keys_held * h.kv_heads * 2 * h.head_dim))
        count = len(contexts)
        step = -(-count // -(-count // most))
        groups = []
        for start in range(0, count, step):
            stop = min(start + step, count)
            part = contexts[start:stop]
            first_key = _first_keys(kv, part, window)
            keys = self._num_keys(kv, part, first_key)
            group = self._group(kv, stop - start, 1, keys, rows_in_place=True)
            seen = _seen_by_rows(part, first_key, keys, window)
            mask = np.where(seen, _ZERO, _MASKED)[:, None]
            if len(part) > 1 and h.kv_heads > 1:
                mask = mask.repeat(h.kv_heads, axis=1)
            self._masks.append(RowMask(start, stop, mask))
            group.mask = self._mask_operand(group, mask.reshape(-1, 1, keys), kv)
            group.gather = self._gather(group, kv, tables[start:stop], first_key, part)
            group.bind_rows(fused, out, start, stop)
            groups.append(group)
        return groups

    def _pieces(self, query_lens: I64, contexts: I64, starts: I64) -> I64:
        """Long queries are cut at multiples of a chunk in absolute position."""
        if int(query_lens.max()) <= _SMALL_QUERY_TOKENS:
            return np.stack([iota(len(starts)), starts, query_lens, contexts])
        found: list[tuple[int, int, int, int]] = []
        for b, (length, context, row) in enumerate(
            zip(query_lens.tolist(), contexts.tolist(), starts.tolist(), strict=True)
        ):
            if length <= _SMALL_QUERY_TOKENS:
                found.append((b, row, length, context))
                continue
            heads = self.heads.kv_heads * self.heads.group
            chunk = max(8, min(_CHUNK_TOKENS, _MAX_SCORES // (heads * context)))
            at, end = context - length, context
            while at < end:
                stop = min(end, (at // chunk + 1) * chunk)
                found.append((b, row, stop - at, stop))
                row, at = row + stop - at, stop
        return np.array(found, dtype=np.int64).T

    def _partition(self, pieces: I64) -> list[I64]:
        """Pieces of like shape together. Everything small goes into one group unless padding to
        the largest would cost more than another group."""
        small = pieces[2] <= _SMALL_QUERY_TOKENS
        parts = [pieces[:, i : i + 1] for i in np.flatnonzero(~small)]
        pieces = pieces[:, small]
        if not pieces.shape[1]:
            return parts
        query_lens, contexts = pieces[2], pieces[3]
        area = int(query_lens.max()) * int(contexts.max()) * len(contexts)
        waste = (area - int((query_lens * contexts).sum())) * self.heads.kv_heads
        if waste <= _MAX_WASTE:
            return [*parts, pieces]
        # Powers of two in both directions: at most a factor of two of padding in each.
        classes = _log2_class(query_lens) * 64 + _log2_class(contexts)
        return [*parts, *(pieces[:, classes == c] for c in np.unique(classes))]

    def _piece_group(
        self,
        kv: KVCache,
        pieces: I64,
        tables: NDArray[np.int32],
        window: int | None,
        fused: Tensor,
        out: Tensor,
    ) -> Group:
        h = self.heads
        sequences, rows, query_lens, contexts = pieces
        first_key = _first_keys(kv, contexts - query_lens + 1, window)
        keys = self._num_keys(kv, contexts, first_key)
        least = max(product_rows(h.head_dim, kv.data.device.type, torch.get_num_threads()))
        queries = max(int(query_lens.max()), -(-least // h.group))
        group = self._group(kv, len(rows), queries, keys, rows_in_place=False)
        seen = _seen_by_queries(queries, query_lens, contexts, first_key, keys, window)
        mask = np.where(seen, _ZERO, _MASKED).repeat(h.group, axis=1)
        if len(rows) > 1 and h.kv_heads > 1:
            mask = mask.repeat(h.kv_heads, axis=0)
        group.mask = self._mask_operand(group, mask, kv)
        group.gather = self._gather(group, kv, tables[sequences], first_key, contexts)
        pack, unpack = self._units(rows, query_lens, queries, len(out) - 1)
        copies = group.operands.shape.pairs // (len(rows) * h.kv_heads)
        if copies > 1:
            pack, unpack = np.tile(pack, copies), np.tile(unpack, copies)
        device = kv.data.device
        group.bind_pieces(
            fused, out, torch.from_numpy(pack).to(device), torch.from_numpy(unpack).to(device)
        )
        return group

    def _num_keys(self, kv: KVCache, contexts: I64, first_key: I64) -> int:
        tile = math.lcm(LANES, kv.block_size)
        return -(-int((contexts - first_key).max()) // tile) * tile

    def _group(
        self, kv: KVCache, count: int, queries: int, keys: int, *, rows_in_place: bool
    ) -> Group:
        """A group of `count` pieces with operands of its shape, from an earlier step if possible:
        groups of a step run one after another and may share them."""
        h = self.heads
        rows = queries * h.group
        query_rows = value_rows = rows
        if rows_in_place:
            least = product_rows(h.head_dim, kv.data.device.type, torch.get_num_threads())
            value_rows = max(rows, least[1])
            query_rows = max(value_rows, least[0])
        pairs = count * h.kv_heads
        shape = GroupShape(2 if pairs == 1 else pairs, query_rows, value_rows, keys)
        operands = self._operands.get(shape)
        if operands is None:
            if len(self._operands) >= _CACHED_SHAPES:
                self._operands.popitem(last=False)
            operands = self._operands[shape] = Operands(shape, h, kv)
        else:
            self._operands.move_to_end(shape)
        return Group(operands, h)

    def _mask_operand(self, group: Group, mask: NDArray[np.float32], kv: KVCache) -> Tensor:
        """[pairs or 1, rows or 1, keys] spread over the scores of a group, sharing memory."""
        shared = torch.from_numpy(mask).to(kv.data.device)
        return shared.expand(group.operands.scores.shape)

    def _gather(
        self,
        group: Group,
        kv: KVCache,
        tables: NDArray[np.int32],
        first_key: I64,
        contexts: I64,
    ) -> Tensor:
        """Rows of `kv.block_rows` in the order of the operands: int64 [pairs * blocks]."""
        h, shape = self.heads, group.operands.shape
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
        return torch.from_numpy(gather).to(kv.data.device)

    def _units(self, rows: I64, query_lens: I64, queries: int, spare: int) -> tuple[I64, I64]:
        """(token, KV head) units for each (piece, KV head, query): where to read, and where to
        write. Padding reads unit 0 and writes to row `spare`."""
        kv_heads = self.heads.kv_heads
        units = (rows[:, None] + iota(queries)) * kv_heads
        real = (iota(queries) < query_lens[:, None])[:, None]
        units = units[:, None] + iota(kv_heads)[:, None]
        read = np.where(real, units, 0)
        write = np.where(real, units, spare * kv_heads)
        return read.reshape(-1), write.reshape(-1)


def _token_slots(kv: KVCache, query_lens: I64, positions: I64, tables: NDArray[np.int32]) -> I64:
    """Rows of `kv.token_rows` of each (token, KV head): [T * kv_heads]."""
    size = kv.block_size
    rows = iota(len(query_lens))
    if len(positions) != len(rows):
        rows = rows.repeat(query_lens)
    index = positions // size
    flat = tables[rows, index] * size + (positions - index * size)
    slots: I64 = (flat[:, None] + kv.head_base * size).reshape(-1)
    return slots


def _log2_class(values: I64) -> I64:
    return np.ceil(np.log2(values)).astype(np.int64)


def _first_keys(kv: KVCache, contexts: I64, window: int | None) -> I64:
    """First gathered position, where the first query stands at `contexts - 1`: 0, or a segment
    boundary at or before the first key it sees."""
    if window is None:
        return np.zeros_like(contexts)
    step = math.lcm(SEGMENT_TOKENS, kv.block_size)
    return np.maximum(contexts - window, 0) // step * step


def _seen_by_rows(
    contexts: I64, first_key: I64, keys: int, window: int | None
) -> NDArray[np.bool_]:
    """[pieces, keys]: whether the row at `contexts - 1` sees a key."""
    positions = iota(keys) + first_key[:, None]
    seen: NDArray[np.bool_] = positions < contexts[:, None]
    if window is not None:
        seen &= positions >= contexts[:, None] - window
    return seen


def _seen_by_queries(
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
