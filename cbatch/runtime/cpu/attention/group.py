"""Attention over paged KV for a ragged batch. The bits of a row depend only on its own position.

Keys are gathered in tiles of a fixed width from absolute position 0 (or from a fixed boundary
before a sliding window). So a row has the same keys in the same lanes, whatever the length of other
rows. Keys beyond a row are masked with a large finite number and have no effect:

- a score is a sum over `head_dim` only. Queries are scaled before the product: a product applies a
  scale (unless a power of two) at different points for few and for many rows;
- softmax adds lane by lane in order of position, and a masked key adds exactly 0;
- the product with V runs over segments of `SEGMENT_TOKENS` at absolute positions. Each is short
  enough to be summed in one piece, and the segments are added in order.

The number of rows in a product must not change the bits of a row. This holds for products of at
least `product_rows` rows, a measured number. A batch of one product is doubled, since a library may
split a single product among threads by its row count.

This module runs one group of queries; `layout` forms the groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelConfig

LANES = 16  # fp32 elements of the widest vector; keys are padded to multiples
SEGMENT_TOKENS = 128  # positions of a sum; libraries split sums of more than 144 (some: 240)
MASKED = -1e30  # finite: exp gives 0, and 0 times a stale value is 0
_MAX_PROBED_ROWS = 16


@functools.lru_cache(maxsize=64)
def product_rows(head_dim: int, threads: int) -> tuple[int, int]:
    """Return the smallest row counts (q k^T, p v) from which a row's bits do not depend on the
    count.

    Measured on random data once per process, up to 16 rows. `threads` only extends the cache key.
    """
    gen = torch.Generator().manual_seed(0)
    kv = torch.randn(4, SEGMENT_TOKENS, 2, head_dim, generator=gen)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1]
    q = torch.randn(4, 40, head_dim, generator=gen)
    p = torch.rand(4, 40, SEGMENT_TOKENS, generator=gen)
    p[:, :, LANES:] = 0
    zero = torch.zeros(1)
    scores, out = torch.baddbmm(zero, q, keys), torch.bmm(p, values)
    twice = torch.baddbmm(out, p, values)

    def same_scores(rows: int, num_keys: int) -> bool:
        part = torch.baddbmm(zero, q[:, :rows], keys[:, :, :num_keys])
        return torch.equal(part, scores[:, :rows, :num_keys])

    def same_values(rows: int, num_keys: int) -> bool:
        first, part = out[:, :rows], (p[:, :rows, :num_keys], values[:, :num_keys])
        added = torch.baddbmm(first, *part)  # as for a later segment
        return torch.equal(torch.bmm(*part), first) and torch.equal(added, twice[:, :rows])

    def smallest(same: Callable[[int, int], bool]) -> int:
        # The narrowest product is tried, too: libraries have special kernels for tiny products.
        differing = [
            rows
            for rows in range(1, _MAX_PROBED_ROWS + 1)
            if not (same(rows, SEGMENT_TOKENS) and same(rows, LANES))
        ]
        return min(max(differing, default=0) + 1, _MAX_PROBED_ROWS)

    return smallest(same_scores), smallest(same_values)


class HeadShape(NamedTuple):
    """The attention heads of a model. A row of the fused projection is [kv_heads, group + 2,
    head_dim]: for each KV head its query heads, then its K, then its V."""

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


class GroupShape(NamedTuple):
    """The shape of a group: the number of `pairs` (piece, KV head), each with `query_rows` rows of
    scores over `keys` positions. The first `value_rows` rows are multiplied by V."""

    pairs: int
    query_rows: int
    value_rows: int
    keys: int


class Operands:
    """The buffers of one group shape, and the views that its products read."""

    def __init__(self, shape: GroupShape, heads: HeadShape, kv: KVCache) -> None:
        dtype, dim = kv.data.dtype, heads.head_dim
        pairs, rows, value_rows, keys = shape
        width = kv.block_size * 2 * dim
        self.shape = shape
        self.blocks = torch.empty(pairs * keys * 2 * dim // width, width, dtype=dtype)
        self.wide = self.blocks if dtype == torch.float32 else self.blocks.float()
        tiles = self.wide.view(pairs, keys, 2, dim)
        values = tiles[:, :, 1]
        self.keys_transposed = tiles[:, :, 0].transpose(1, 2)
        self.scores = torch.empty(pairs, rows, keys)
        self.probs = torch.empty(pairs, rows, keys)
        used = self.probs[:, :value_rows]
        self.segments = [
            (used[:, :, at : at + SEGMENT_TOKENS], values[:, at : at + SEGMENT_TOKENS])
            for at in range(0, keys, SEGMENT_TOKENS)
        ]
        self.out = torch.empty(pairs, value_rows, dim)


class Group:
    """Queries that share one batched product.

    A group has either consecutive rows of the batch, one per sequence, or pieces: several rows of a
    sequence each. Products of single rows read the step's buffers in place. The (token, KV head)
    units of pieces are copied (`pack`, `unpack`). The planner sets `gather` and `mask` every step.
    """

    gather: Tensor  # int64 [pairs * blocks]: rows of `layer_blocks` to read
    mask: Tensor  # additive, fp32 [pairs, query_rows, keys]

    def __init__(self, operands: Operands, heads: HeadShape) -> None:
        self.operands, self.heads = operands, heads
        self.pack: Tensor | None = None
        self.unpack: Tensor | None = None

    def bind_rows(self, fused: Tensor, out: Tensor, start: int, stop: int) -> None:
        """Read the single rows [start, stop) of `fused` [T, row_width], which has spare memory
        after its end, and write the same rows of `out` [T + 1, heads * head_dim]."""
        h, shape = self.heads, self.operands.shape
        count = (stop - start) * h.kv_heads
        # The query heads of a (token, KV head), then the memory after them as padding.
        query = fused.as_strided(
            (count, shape.query_rows, h.head_dim),
            (h.roles * h.head_dim, h.head_dim, 1),
            fused.storage_offset() + start * h.row_width,
        )
        self.source = query if count == shape.pairs else query.expand(shape.pairs, -1, -1)
        self.target = out[start:stop].view(count, h.group, h.head_dim)
        self.direct = self.operands.out.shape == self.target.shape

    def bind_pieces(self, fused: Tensor, out: Tensor, pack: Tensor, unpack: Tensor) -> None:
        """Read the units `pack` of `fused` and write the units `unpack` of `out`. The last row of
        `out` receives the results of padding."""
        h = self.heads
        self.source = fused.view(-1, h.roles * h.head_dim)[:, : h.group * h.head_dim]
        self.target = out.view(-1, h.group * h.head_dim)
        self.pack, self.unpack = pack, unpack
        self.direct = False

    def run(self, layer_blocks: Tensor) -> None:
        """Attend to K and V in one layer's blocks with the queries of the bound buffer."""
        op = self.operands
        torch.index_select(layer_blocks, 0, self.gather, out=op.blocks)
        if op.wide is not op.blocks:
            op.wide.copy_(op.blocks)
        query = self.source
        if self.pack is not None:
            query = query.index_select(0, self.pack).view(op.shape.pairs, -1, self.heads.head_dim)
        torch.baddbmm(self.mask, query, op.keys_transposed, out=op.scores)
        torch.softmax(op.scores, -1, out=op.probs)
        out = self.target if self.direct else op.out
        first, *others = op.segments
        torch.bmm(*first, out=out)
        for probs, values in others:
            out.baddbmm_(probs, values)
        if self.unpack is not None:
            self.target.index_copy_(0, self.unpack, out.view(len(self.unpack), -1))
        elif not self.direct:
            self.target.copy_(out[: len(self.target), : self.heads.group])
