"""Ragged steps over a paged pool of scattered pages; all other memory is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triton_kernels.attention import (
    Heads,
    Partials,
    Tile,
    WorkList,
    attention,
    attention_reference,
    plan,
)

TILES = {
    torch.float32: Tile(16, 16, 4, 2),
    torch.bfloat16: Tile(32, 32, 4, 2),
    torch.float16: Tile(64, 16, 4, 2),
}


class Step(NamedTuple):
    """A step with `queries` (query_len, context_len) of each sequence; its pages are scattered in
    the pool.

    Memory that is no key of a sequence is NaN: the tails of pages, and unused pages. Entries of
    block tables that must not be read point to such a page.
    """

    heads: Heads
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    tables: Tensor
    starts: Tensor
    contexts: Tensor

    @classmethod
    def make(
        cls,
        queries: Sequence[tuple[int, int]],
        heads: Heads,
        *,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> Step:
        gen = torch.Generator().manual_seed(seed)
        counts = [-(-context // page_tokens) for _, context in queries]
        num_pages = sum(counts) + 3
        order = torch.randperm(num_pages, generator=gen).tolist()
        nobody = order.pop()
        # K and V of a token are adjacent, with the strides of a fused pool.
        pool = torch.full((num_pages, page_tokens, heads.kv_heads, 2, heads.head_dim), float("nan"))
        tables = torch.full((len(queries), max(counts, default=0) + 2), nobody, dtype=torch.int32)
        for row, (_, context), count in zip(tables, queries, counts, strict=True):
            pages = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
            row[:count] = pages.int()
            keys = torch.randn(context, *pool.shape[2:], generator=gen)
            at = torch.arange(context)
            pool[pages[at // page_tokens], at % page_tokens] = keys
        stored = pool.to(kv_dtype or dtype)
        lens = torch.tensor([0, *(query for query, _ in queries)])
        rows = int(lens.sum())
        # Queries have the layout of a fused projection.
        fused = torch.randn(
            rows, heads.kv_heads, heads.group + 2, heads.head_dim, generator=gen
        ).to(dtype)
        return cls(
            heads,
            fused[:, :, : heads.group],
            stored[:, :, :, 0],
            stored[:, :, :, 1],
            tables,
            lens.cumsum(0).int(),
            torch.tensor([context for _, context in queries], dtype=torch.int32),
        )

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def work(
        self,
        *,
        tile: Tile | None = None,
        split_tokens: int = 32,
        max_partials: int = 64,
        **options: Any,
    ) -> WorkList:
        """Plan the step, with memory that is NaN until it is written."""
        tile = tile or TILES[self.q.dtype]
        partials = Partials.allocate(max_partials, self.heads, tile, "cpu")
        partials.sums.fill_(float("nan"))
        partials.stats.fill_(float("nan"))
        work = WorkList.allocate(
            partials,
            self.heads,
            tile,
            max_tokens=len(self.q),
            max_sequences=len(self.contexts),
            split_tokens=split_tokens,
            **options,
        )
        work.items.fill_(-(1 << 30))
        plan(self.starts, self.contexts, work)
        return work

    def run(
        self, work: WorkList, *, num_programs: int = 5, check: bool = True, **options: Any
    ) -> Tensor:
        """Return attention, [T, kv_heads, group, head_dim]; `check`: the work list must be ready
        for reuse."""
        out = torch.full((len(self.q), self.q[0].numel()), float("nan"), dtype=self.q.dtype)
        attention(
            self.q,
            self.k_pages,
            self.v_pages,
            self.tables,
            out,
            work,
            scale=self.scale,
            num_programs=num_programs,
            **options,
        )
        assert not (check and work.partials.arrived.any())
        return out.view(self.q.shape)

    def reference(self, **options: Any) -> Tensor:
        clean = (p.float().nan_to_num() for p in (self.k_pages, self.v_pages))
        return attention_reference(
            self.q, *clean, self.tables, self.starts, self.contexts, scale=self.scale, **options
        )
