"""Ragged attention steps on the device: scattered pages of a random pool, planned work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.grid import Query, Shape
from triton_kernels.attention import (
    Heads,
    Partials,
    Tile,
    WorkList,
    attention,
    attention_reference,
    plan,
)

TABLE_MULTIPLE = 16  # entries of a row: a stride that kernels know to be aligned


class Config(NamedTuple):
    """How attention is launched."""

    tile: Tile
    split_tokens: int


class Pool(NamedTuple):
    """K and V of one layer, [pages, page_tokens, kv_heads, head_dim] each, side by side."""

    k_pages: Tensor
    v_pages: Tensor

    @classmethod
    def make(
        cls,
        num_pages: int,
        page_tokens: int,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> Pool:
        generator = torch.Generator(device).manual_seed(seed)
        pages = (num_pages, page_tokens, shape.kv_heads, 2, shape.head_dim)
        wide = dtype if dtype.itemsize > 1 else torch.bfloat16
        values = torch.randn(pages, dtype=wide, device=device, generator=generator).to(dtype)
        return cls(values[:, :, :, 0], values[:, :, :, 1])

    @property
    def page_tokens(self) -> int:
        return self.k_pages.shape[1]


class Step(NamedTuple):
    """The queries of a step, and where their keys lie."""

    shape: Shape
    queries: tuple[Query, ...]
    pool: Pool
    q: Tensor  # [T, kv_heads, group, head_dim], as it stands in a fused projection
    tables: Tensor
    starts: Tensor
    contexts: Tensor

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def work(
        self,
        config: Config,
        *,
        most_partials: int | None = None,
        window: int | None = None,
    ) -> WorkList:
        """Planned; memory for partial results holds NaN until it is written."""
        heads, device = Heads(*self.shape), self.q.device
        wanted = sum(
            -(-q.query_tokens * self.shape.group // config.tile.rows)
            * -(-q.context_tokens // config.split_tokens)
            for q in self.queries
        )
        count = max(1, wanted + len(self.queries)) if most_partials is None else most_partials
        partials = Partials.allocate(count, heads, config.tile, device)
        partials.sums.fill_(torch.nan)
        partials.stats.fill_(torch.nan)
        work = WorkList.allocate(
            partials,
            heads,
            config.tile,
            most_tokens=len(self.q),
            most_sequences=len(self.queries),
            split_tokens=config.split_tokens,
            window=window,
        )
        plan(self.starts, self.contexts, work)
        return work

    def run(
        self,
        work: WorkList,
        num_programs: int,
        out: Tensor | None = None,
        *,
        soft_cap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """[T, heads * head_dim]; poisoned first unless `out` is given."""
        if out is None:
            out = self.q.new_full((len(self.q), self.q[0].numel()), torch.nan)
        attention(
            self.q,
            *self.pool,
            self.tables,
            out,
            work,
            scale=self.scale,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            num_programs=num_programs,
        )
        return out

    def reference(self, **options: float | int | None) -> Tensor:
        """fp32 [T, heads * head_dim]."""
        wide = (pages.float() for pages in self.pool)
        found = attention_reference(
            self.q, *wide, self.tables, self.starts, self.contexts, scale=self.scale, **options
        )
        return found.flatten(1)

    def only(self, sequence: int, first: int, last: int) -> Step:
        """The tokens `first`..`last` (rows of the sequence's query) as a step of their own."""
        query, row = self.queries[sequence], int(self.starts[sequence])
        context = query.context_tokens - query.query_tokens + last + 1
        count = last + 1 - first
        device = self.q.device
        return self._replace(
            queries=(Query(count, context),),
            q=self.q[row + first : row + last + 1],
            tables=self.tables[sequence : sequence + 1],
            starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            contexts=torch.tensor([context], dtype=torch.int32, device=device),
        )


def make_step(
    queries: Sequence[Query], shape: Shape, pool: Pool, dtype: torch.dtype, seed: int = 0
) -> Step:
    """Pages of each sequence lie scattered over the pool; no two sequences share one. What is left
    over is NaN, and where the unused entries of tables lead. Raises ValueError if the pool has too
    few."""
    device, page_tokens = pool.k_pages.device, pool.page_tokens
    counts = [-(-q.context_tokens // page_tokens) for q in queries]
    pages = list(range(len(pool.k_pages)))
    random.Random(seed).shuffle(pages)
    if len(pages) < sum(counts):
        raise ValueError(f"pool: {len(pages)} pages, {sum(counts)} needed")
    width = -(-max(counts) // TABLE_MULTIPLE) * TABLE_MULTIPLE
    tables = torch.zeros(len(counts), width, dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
    if pages and pool.k_pages.itemsize > 1:  # of fp8 not every device assigns
        for half in pool:
            half[pages] = torch.nan
        for table, count in zip(tables, counts, strict=True):
            table[count:] = pages[0]
    lens = torch.tensor([0, *(q.query_tokens for q in queries)])
    generator = torch.Generator(device).manual_seed(seed)
    fused = torch.randn(
        int(lens.sum()),
        shape.kv_heads,
        shape.group + 2,
        shape.head_dim,
        dtype=dtype,
        device=device,
        generator=generator,
    )
    return Step(
        shape,
        tuple(queries),
        pool,
        fused[:, :, : shape.group],
        tables.to(device),
        lens.cumsum(0).int().to(device),
        torch.tensor([q.context_tokens for q in queries], dtype=torch.int32, device=device),
    )


def pages_of(queries: Sequence[Query], page_tokens: int) -> int:
    return sum(-(-q.context_tokens // page_tokens) for q in queries)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN is never the same."""
    return bool((a == b).all())
