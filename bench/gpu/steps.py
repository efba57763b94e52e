"""Ragged attention steps on the device: scattered pages of a random pool, and planned work."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.limits import GridHeads, Query
from bench.gpu.timing import Call
from bench.gpu.world import Bench
from cbatch.runtime.gpu.attention import Tuning
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
        """Laid out as the engine's: a page of a head is one run of memory."""
        generator = torch.Generator(device).manual_seed(seed)
        pages = (shape.kv_heads, num_pages, page_tokens, 2, shape.head_dim)
        wide = dtype if dtype.itemsize > 1 else torch.bfloat16
        values = torch.randn(pages, dtype=wide, device=device, generator=generator).to(dtype)
        k, v = values.permute(3, 1, 2, 0, 4)
        return cls(k, v)

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
        tuning: Tuning,
        *,
        most_partials: int | None = None,
        window: int | None = None,
    ) -> WorkList:
        """Planned; memory for partial results holds NaN until it is written."""
        heads, device = Heads(*self.shape), self.q.device
        count = most_partials or tuning.most_partials
        partials = Partials.allocate(count, heads, tuning.tile, device)
        partials.sums.fill_(torch.nan)
        partials.stats.fill_(torch.nan)
        work = WorkList.allocate(
            partials,
            heads,
            tuning.tile,
            most_tokens=len(self.q),
            most_sequences=len(self.queries),
            split_tokens=tuning.split_tokens,
            balanced=tuning.num_programs if tuning.balanced else None,
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
    """Return `count` steps in bf16 over separate parts of one pool."""
    pages = pages_of(queries, page_tokens)
    pool = Pool.make(count * pages, page_tokens, shape, torch.bfloat16, device)
    parts = (Pool(*(half[i * pages : (i + 1) * pages] for half in pool)) for i in range(count))
    return [make_step(queries, shape, part, torch.bfloat16, i) for i, part in enumerate(parts)]


def pages_of(queries: Sequence[Query], page_tokens: int) -> int:
    return sum(-(-q.context_tokens // page_tokens) for q in queries)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of the reference; NaN where anything is."""
    wide = expected.float()
    return float((found.float() - wide).norm() / wide.norm())


TINY = Tuning(Tile(16, 16, 4, 2), num_programs=2, most_partials=64, split_tokens=32)


def tuning_of(
    shape: GridHeads,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    numerics: str = "invariant",
    query_tokens: int = 1,
) -> Tuning:
    """Return the tuning that an executor would use."""
    return Tuning.of(
        Heads(*shape),
        dtype,
        device,
        page_tokens,
        kv_dtype,
        numerics=numerics,
        query_tokens=query_tokens,
    )


def launches(bench: Bench, steps: Sequence[StepQueries], tuning: Tuning) -> list[Call]:
    """Return a launch for each of the steps, which have the same lengths and one plan: a plan is
    made once a step for all layers, so its cost is not the kernel's. Empty where no kernel runs."""
    if not bench.world.runs:
        return []
    step = steps[0]
    found = tuning.work_lists(
        Heads(*step.shape), step.q.device, most_tokens=len(step.q), most_sequences=len(step.queries)
    )
    works = [
        (work, programs)
        for work, programs in found[None]
        if any(work.queries[0] <= q.query_tokens <= work.queries[1] for q in step.queries)
    ]
    for work, _ in works:
        plan(step.starts, step.contexts, work)

    def run(step: StepQueries, out: Tensor) -> None:
        for work, programs in works:
            step.run(work, programs, out)

    outs = [step.q.new_empty(len(step.q), step.q[0].numel()) for step in steps]
    return [functools.partial(run, step, out=out) for step, out in zip(steps, outs, strict=True)]
