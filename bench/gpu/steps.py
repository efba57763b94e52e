"""Ragged attention steps on the device: scattered pages of a random pool, planned work, and the
configurations of attention that are shipped or may be."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.limits import GridHeads, Query
from bench.gpu.timing import Call
from bench.gpu.world import Bench
from triton_kernels.attention import (
    Heads,
    Partials,
    Tile,
    WorkList,
    arch_of,
    attention,
    attention_reference,
    plan,
    resident_programs,
    tile_for,
)
from triton_kernels.attention.cases import SPLIT_TOKENS

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
        shape: GridHeads,
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


class StepQueries(NamedTuple):
    """The queries of a step, and where their keys lie."""

    shape: GridHeads
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

    def only(self, sequence: int, first: int, last: int) -> StepQueries:
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
    queries: Sequence[Query], shape: GridHeads, pool: Pool, dtype: torch.dtype, seed: int = 0
) -> StepQueries:
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
    return StepQueries(
        shape,
        tuple(queries),
        pool,
        fused[:, :, : shape.group],
        tables.to(device),
        lens.cumsum(0).int().to(device),
        torch.tensor([q.context_tokens for q in queries], dtype=torch.int32, device=device),
    )


def make_steps(
    queries: Sequence[Query], shape: GridHeads, page_tokens: int, device: torch.device, count: int
) -> list[StepQueries]:
    """So many in bf16 over parts of one pool, which share nothing."""
    pages = pages_of(queries, page_tokens)
    pool = Pool.make(count * pages, page_tokens, shape, torch.bfloat16, device)
    parts = (Pool(*(half[i * pages : (i + 1) * pages] for half in pool)) for i in range(count))
    return [make_step(queries, shape, part, torch.bfloat16, i) for i, part in enumerate(parts)]


def pages_of(queries: Sequence[Query], page_tokens: int) -> int:
    return sum(-(-q.context_tokens // page_tokens) for q in queries)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN is never the same."""
    return bool((a == b).all())


TINY = Config(Tile(16, 16, 4, 2), 32)


def config_of(
    shape: GridHeads,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Config:
    """The shipped one: a tile for queries of every length, so that bits do not depend on it."""
    arch = arch_of(device)
    tile = tile_for(Heads(*shape), dtype, page_tokens, arch=arch, kv_dtype=kv_dtype)
    return Config(tile, SPLIT_TOKENS)


def programs(config: Config, device: torch.device) -> int:
    """As many as run at a time."""
    return resident_programs(config.tile, device) if device.type == "cuda" else 2


def launches(bench: Bench, steps: Sequence[StepQueries], config: Config) -> list[Call]:
    """Of steps of the same lengths, planned once for all: a plan is made once a step for all
    layers, so its cost is not the kernel's. None where kernels do not run."""
    if not bench.world.runs:
        return []
    work, many = steps[0].work(config), programs(config, bench.device)
    outs = [step.q.new_empty(len(step.q), step.q[0].numel()) for step in steps]
    pairs = zip(steps, outs, strict=True)
    return [functools.partial(step.run, work, many, out=out) for step, out in pairs]


def candidates(shape: GridHeads, page_tokens: int) -> Iterator[Config]:
    """Likeliest first: time that runs out leaves the tail untried. The last two differ in the
    length of a split only."""
    for rows, keys, num_warps, num_stages, resident in (
        (64, 64, 4, 3, 2),
        (16, 64, 4, 3, 2),
        (64, 64, 4, 3, 1),
        (16, 64, 4, 3, 3),
        (64, 128, 8, 3, 1),
        (64, 32, 4, 3, 3),
        (32, 64, 4, 3, 2),
        (16, 128, 4, 3, 1),
        (128, 64, 8, 3, 1),
        (64, 64, 8, 3, 2),
        (16, 32, 4, 3, 4),
        (128, 128, 8, 3, 1),
        (64, 64, 4, 4, 1),
    ):
        if rows < shape.group:
            continue
        tile = Tile(rows, keys, num_warps, num_stages, resident)
        if page_tokens % keys == 0:
            yield Config(tile._replace(descriptors=True), SPLIT_TOKENS)
        yield Config(tile, SPLIT_TOKENS)
    for split_tokens in (SPLIT_TOKENS // 2, 2 * SPLIT_TOKENS):
        yield Config(Tile(64, 64, 4, 3, 2, page_tokens % 64 == 0), split_tokens)
