"""Attention over paged KV for a ragged batch, with bits that depend on a row's own position only.

Keys are gathered in tiles of a fixed width from absolute position 0 (or a fixed boundary before a
sliding window), so a row always meets the same keys in the same lanes, however long its neighbours
are. What lies beyond a row is masked with a large finite number and is an exact no-op:

- a score is a sum over `head_dim` alone (queries come scaled: a factor of the product that is not a
  power of two is applied at different places for few rows and for many);
- softmax adds lane by lane in order of position, and a masked key adds exactly 0;
- the product with V runs over segments of `SEGMENT_TOKENS` at absolute positions, each short enough
  to be summed in one piece, and the segments are added in order.

The number of rows in a product must not change the bits of a row: that holds from a small row count
on (`product_rows`, measured), and batches of one product are doubled, since a library may split a
single product among threads by its row count.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.config import ModelConfig
from cbatch.runtime.kv import KVCache

I64 = NDArray[np.int64]

TILE_TOKENS = 32
SEGMENT_TOKENS = 256
MASKED = -1e30  # finite: exp gives 0, and 0 times a stale value stays 0
_CHUNK_TOKENS = 128  # longer queries are cut at multiples of this; none meets keys of its future
_SMALL_QUERY_TOKENS = 32  # queries up to this length share products with others
_MAX_SCORES = 1 << 24  # elements of one score buffer
_MAX_WASTE = 1 << 18  # padded scores that are cheaper than one more group


@functools.lru_cache(maxsize=64)
def product_rows(head_dim: int, device_type: str, threads: int) -> tuple[int, int]:
    """Smallest row counts (q k^T, p v) from which a row's bits do not depend on the count.

    Measured on random data once per process, up to 16. `threads` is part of the
    key only.
    """
    if device_type != "cpu":
        return 2, 2
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(4, SEGMENT_TOKENS, head_dim, generator=gen)
    q = torch.randn(4, 40, head_dim, generator=gen)
    p = torch.rand(4, 40, SEGMENT_TOKENS, generator=gen)
    zero = torch.zeros(1)
    scores, values = torch.baddbmm(zero, q, k.transpose(1, 2)), torch.bmm(p, k)

    def smallest(agrees: list[bool]) -> int:
        differing = [rows for rows, same in enumerate(agrees, start=1) if not same]
        return max(differing, default=0) + 1

    score_rows = [
        torch.equal(torch.baddbmm(zero, q[:, :m], k.transpose(1, 2)), scores[:, :m])
        for m in range(1, 17)
    ]
    value_rows = [torch.equal(torch.bmm(p[:, :m], k), values[:, :m]) for m in range(1, 17)]
    return min(smallest(score_rows), 16), min(smallest(value_rows), 16)


@dataclass(frozen=True)
class HeadShape:
    """Heads of one model; a row of the fused projection is [kv_heads, group + 2, head_dim]: for
    each KV head its query heads, then its K, then its V."""

    kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> HeadShape:
        return cls(config.num_kv_heads, config.group_size, config.head_dim)

    @property
    def roles(self) -> int:
        return self.group + 2

    @property
    def row_width(self) -> int:
        return self.kv_heads * self.roles * self.head_dim


class _Operands:
    """Buffers of one group shape and the views the products read. Reused from step to step."""

    def __init__(
        self, pairs: int, rows: int, keys: int, heads: HeadShape, kv: KVCache, value_rows: int
    ) -> None:
        device, dim = kv.data.device, heads.head_dim
        self.dim = dim
        self.blocks = torch.empty(
            2 * pairs * keys // kv.block_size,
            kv.block_size * dim,
            dtype=kv.data.dtype,
            device=device,
        )
        self.wide = self.blocks
        if kv.data.dtype != torch.float32:
            self.wide = torch.empty(self.blocks.shape, device=device)
        k, v = self.wide.view(2, pairs, keys, dim)
        self.k_transposed = k.transpose(1, 2)
        self.scores = torch.empty(pairs, rows, keys, device=device)
        self.probs = torch.empty(pairs, rows, keys, device=device)
        cuts = range(0, keys, SEGMENT_TOKENS)
        used = self.probs[:, :value_rows]
        self.segments = [
            (used[:, :, c : c + SEGMENT_TOKENS], v[:, c : c + SEGMENT_TOKENS]) for c in cuts
        ]
        self.out = torch.empty(pairs, value_rows, dim, device=device)


class Group:
    """Pieces that share one batched product, over items of (piece, KV head)."""

    def __init__(
        self,
        operands: _Operands,
        gather: Tensor,
        mask: Tensor,
        rows: tuple[int, int] | None,
        pack: Tensor | None,
        unpack: Tensor | None,
        heads: HeadShape,
    ) -> None:
        self.operands, self.gather, self.mask = operands, gather, mask
        self.rows, self.pack, self.unpack, self.heads = rows, pack, unpack, heads

    def bind(self, fused: Tensor, out: Tensor) -> None:
        """Views into the step's buffers: `fused` [T, row_width], with spare memory behind it, and
        `out` [T + 1, heads * head_dim], whose last row takes what belongs to no one."""
        h = self.heads
        if self.rows is None:
            self.source = fused.view(-1, h.roles * h.head_dim)[:, : h.group * h.head_dim]
            self.target = out.view(-1, h.group * h.head_dim)
            return
        start, stop = self.rows
        pairs, query_rows, _ = self.operands.scores.shape
        count = (stop - start) * h.kv_heads
        # The query heads of a (token, KV head), then whatever follows them: padding.
        query = fused.as_strided(
            (count, query_rows, h.head_dim),
            (h.roles * h.head_dim, h.head_dim, 1),
            fused.storage_offset() + start * h.row_width,
        )
        self.source = query if count == pairs else query.expand(pairs, -1, -1)
        self.target = out[start:stop].view(count, h.group, h.head_dim)

    def run(self, block_rows: Tensor) -> None:
        """Attend: queries from the bound buffer, K and V from one layer's blocks."""
        op = self.operands
        torch.index_select(block_rows, 0, self.gather, out=op.blocks)
        if op.wide is not op.blocks:
            op.wide.copy_(op.blocks)
        query = self.source
        if self.pack is not None:
            query = query.index_select(0, self.pack).view(op.scores.shape[0], -1, op.dim)
        torch.baddbmm(self.mask, query, op.k_transposed, out=op.scores)
        torch.softmax(op.scores, -1, out=op.probs)
        direct = self.unpack is None and op.out.shape == self.target.shape
        out = self.target if direct else op.out
        first, *others = op.segments
        torch.bmm(*first, out=out)
        for probs, values in others:
            out.baddbmm_(probs, values)
        if self.unpack is not None:
            self.target.index_copy_(0, self.unpack, out.view(len(self.unpack), -1))
        elif not direct:
            self.target.copy_(out[: len(self.target), : self.heads.group])


class AttentionPlanner:
    """Lays out the attention of a step: once for all layers of one window."""

    def __init__(self, config: ModelConfig) -> None:
        self.heads = HeadShape.of(config)
        self._operands: dict[tuple[int, ...], _Operands] = {}
        self._kv: KVCache | None = None

    def token_slots(self, kv: KVCache, rows: I64, positions: I64, tables: I64) -> Tensor:
        """Rows of `kv.token_rows` that take K and V of each token: int64 [T, kv_heads, 2].

        `rows` [T]: the sequence of each token."""
        size = kv.block_size
        flat = tables[rows, positions // size] * size + positions % size
        slots = (kv.head_base.T * size)[None] + flat[:, None, None]
        return torch.from_numpy(slots).to(kv.data.device)

    def groups(
        self,
        kv: KVCache,
        query_lens: I64,
        context_lens: I64,
        tables: I64,
        window: int | None,
    ) -> list[Group]:
        """Groups that together cover every row once. `tables` [B, blocks]: block ids; entries that
        lie beyond a context are not read."""
        if self._kv is not kv:
            self._kv, self._operands = kv, {}
        if window is not None and int(context_lens.max()) <= window:
            window = None
        starts = np.cumsum(query_lens) - query_lens
        if int(query_lens.max()) == 1 and not self._wasteful(context_lens, 1):
            pieces = np.stack([starts, starts, query_lens, context_lens])
            return [self._group(kv, pieces, tables, window, None)]
        pieces = self._pieces(query_lens, context_lens, starts)
        return [
            self._group(kv, part, tables, window, int(query_lens.sum()))
            for part in self._partition(pieces)
        ]

    def _wasteful(self, contexts: I64, query_len: int) -> bool:
        padded = int(contexts.max()) * len(contexts) - int(contexts.sum())
        return padded * query_len * self.heads.kv_heads * 8 > _MAX_WASTE

    def _pieces(self, query_lens: I64, context_lens: I64, starts: I64) -> I64:
        """[4, P]: sequence, first row, query length and context of each piece. Long queries are cut
        at multiples of a chunk in absolute position: no piece meets keys of its future."""
        found: list[tuple[int, int, int, int]] = []
        for b, (length, context, row) in enumerate(
            zip(query_lens.tolist(), context_lens.tolist(), starts.tolist(), strict=True)
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
        query_lens, contexts = pieces[2], pieces[3]
        small = query_lens <= _SMALL_QUERY_TOKENS
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
        classes = _log2_class(query_lens) * 64 + _log2_class(-(-contexts // TILE_TOKENS))
        return [*parts, *(pieces[:, classes == c] for c in np.unique(classes))]

    def _group(
        self, kv: KVCache, pieces: I64, tables: I64, window: int | None, num_rows: int | None
    ) -> Group:
        """One group of `pieces` [4, P]. `num_rows` is the number of rows of the step, or None if
        the pieces are single rows that follow one another: then nothing is copied."""
        h, consecutive = self.heads, num_rows is None
        threads = torch.get_num_threads()
        score_rows, value_rows = product_rows(h.head_dim, kv.data.device.type, threads)
        sequences, rows, query_lens, contexts = pieces
        tile = math.lcm(TILE_TOKENS, kv.block_size)
        first_key = self._first_keys(kv, query_lens, contexts, window)
        keys = -(-int((contexts - first_key).max()) // tile) * tile
        queries = int(query_lens.max())
        count = len(sequences)
        copies = 2 if count * h.kv_heads == 1 else 1
        if consecutive:
            query_rows, out_rows = max(h.group, score_rows), max(h.group, value_rows)
            query_rows = max(query_rows, out_rows)
        else:
            queries = max(queries, -(-max(score_rows, value_rows) // h.group))
            query_rows = out_rows = queries * h.group
        operands = self._reuse(count * h.kv_heads * copies, query_rows, keys, kv, out_rows)
        mask = _mask(queries, query_lens, contexts, first_key, keys, window, consecutive)
        gather = _gather_index(kv, tables[sequences], first_key, contexts, keys)
        device = kv.data.device
        packed = None if num_rows is None else self._pack_index(rows, query_lens, queries, num_rows)
        if copies == 2:
            gather = np.repeat(gather, 2, axis=1)
            packed = None if packed is None else (np.tile(packed[0], 2), np.tile(packed[1], 2))
        return Group(
            operands,
            torch.from_numpy(gather.reshape(-1)).to(device),
            self._mask_operand(mask, copies, query_rows).to(device),
            (int(rows[0]), int(rows[0]) + count) if consecutive else None,
            None if packed is None else torch.from_numpy(packed[0]).to(device),
            None if packed is None else torch.from_numpy(packed[1]).to(device),
            h,
        )

    def _first_keys(self, kv: KVCache, query_lens: I64, contexts: I64, window: int | None) -> I64:
        """First gathered position of each piece: 0, or a segment boundary at or before the first
        key that its first query can see."""
        if window is None:
            return np.zeros_like(contexts)
        step = math.lcm(SEGMENT_TOKENS, kv.block_size)
        first_visible = np.maximum(contexts - query_lens - window + 1, 0)
        return first_visible // step * step

    def _mask_operand(self, mask: NDArray[np.float32], copies: int, query_rows: int) -> Tensor:
        """[pairs, 1 or rows, keys] from [pieces, 1 or queries, keys]."""
        h = self.heads
        found = torch.from_numpy(mask)
        if mask.shape[1] > 1:
            found = found.repeat_interleave(h.group, dim=1)
        count, rows, keys = found.shape
        pairs = count * h.kv_heads * copies
        if count == 1:
            return found.expand(pairs, query_rows, keys)
        spread = found[:, None].expand(count, h.kv_heads, rows, keys).reshape(pairs, rows, keys)
        return spread.expand(pairs, query_rows, keys)

    def _pack_index(
        self, rows: I64, query_lens: I64, queries: int, num_rows: int
    ) -> tuple[I64, I64]:
        """Index of (token, KV head) units for each (piece, KV head, query): where to read, and
        where to write. Padding reads unit 0 and writes behind the last row."""
        h = self.heads
        offsets = np.arange(queries)
        units = (rows[:, None] + offsets) * h.kv_heads
        real = offsets < query_lens[:, None]
        heads = np.arange(h.kv_heads)[None, :, None]
        read = np.where(real[:, None], units[:, None] + heads, 0)
        write = np.where(real[:, None], units[:, None] + heads, num_rows * h.kv_heads)
        return read.reshape(-1), write.reshape(-1)

    def _reuse(self, pairs: int, rows: int, keys: int, kv: KVCache, out_rows: int) -> _Operands:
        key = (pairs, rows, keys, out_rows)
        found = self._operands.get(key)
        if found is None:
            if len(self._operands) >= 16:
                self._operands.pop(next(iter(self._operands)))
            found = _Operands(pairs, rows, keys, self.heads, kv, out_rows)
            self._operands[key] = found
        return found


def _log2_class(values: I64) -> I64:
    return np.ceil(np.log2(values)).astype(np.int64)


def _mask(
    queries: int,
    query_lens: I64,
    contexts: I64,
    first_key: I64,
    keys: int,
    window: int | None,
    shared: bool,
) -> NDArray[np.float32]:
    """Additive mask [pieces, 1 if shared else queries, keys]: 0 where a query sees a key."""
    positions = first_key[:, None] + np.arange(keys)
    last = contexts[:, None]
    at = last - 1 if shared else (last - query_lens[:, None]) + np.arange(queries)
    seen = positions[:, None, :] <= at[:, :, None]
    if window is not None:
        seen &= positions[:, None, :] > at[:, :, None] - window
    return np.where(seen, np.float32(0), np.float32(MASKED))


def _gather_index(kv: KVCache, tables: I64, first_key: I64, contexts: I64, keys: int) -> I64:
    """Rows of `kv.block_rows` in the order of the operands: [2, pieces * kv_heads, blocks]."""
    size = kv.block_size
    index = first_key[:, None] // size + np.arange(keys // size)
    held = index * size < contexts[:, None]
    index = np.minimum(index, tables.shape[1] - 1)
    blocks = np.where(held, np.take_along_axis(tables, index, axis=1), kv.scratch_block)
    spread = kv.head_base[:, None, :, None] + blocks[None, :, None, :]
    return spread.reshape(2, -1, keys // size)
