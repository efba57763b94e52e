"""Ragged attention steps on the device: scattered pages of a random pool, and work lists."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.environment import Bench
from bench.gpu.limits import GridHeads, Query
from bench.gpu.timing import Call
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

TABLE_MULTIPLE = 16  # table rows have a multiple of 16 entries, an alignment that kernels rely on


class Pool(NamedTuple):
    """K and V of one layer, interleaved in memory, [pages, page_tokens, kv_heads, head_dim]
    each."""

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
        """Make a random pool laid out like the engine's: a page of a head is contiguous memory."""
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
    """The queries of a step, and the location of their keys."""

    shape: GridHeads
    queries: tuple[Query, ...]
    pool: Pool
    q: Tensor  # [T, kv_heads, group, head_dim], a view into a fused QKV projection
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
        max_partials: int | None = None,
        window: int | None = None,
    ) -> WorkList:
        """Return the planned work list. Memory for partial results holds NaN until a kernel writes
        it."""
        heads, device = Heads(*self.shape), self.q.device
        count = max_partials or tuning.max_partials
        partials = Partials.allocate(count, heads, tuning.tile, device)
        partials.sums.fill_(torch.nan)
        partials.stats.fill_(torch.nan)
        work = WorkList.allocate(
            partials,
            heads,
            tuning.tile,
            max_tokens=len(self.q),
            max_sequences=len(self.queries),
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
        """Run attention; return [T, heads * head_dim]. A new `out` holds NaN until the kernel
        writes it."""
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
        """Return the reference result, fp32 [T, heads * head_dim]."""
        wide = (pages.float() for pages in self.pool)
        result = attention_reference(
            self.q, *wide, self.tables, self.starts, self.contexts, scale=self.scale, **options
        )
        return result.flatten(1)


def make_step(
    queries: Sequence[Query], shape: GridHeads, pool: Pool, dtype: torch.dtype, seed: int = 0
) -> StepQueries:
    """Make a step. Each sequence has pages of its own, scattered over the pool. Remaining pages
    hold NaN, and unused table entries point to one of them. Raises ValueError if the pool is too
    small."""
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
    if pages and pool.k_pages.itemsize > 1:  # not every device can assign fp8 values
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


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the reference; NaN if any value is NaN."""
    wide = expected.float()
    return float((result.float() - wide).norm() / wide.norm())


TINY = Tuning(Tile(16, 16, 4, 2), num_programs=2, max_partials=64, split_tokens=32)


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
    """Return a launch for each step, or [] if kernels do not run here. The steps have equal lengths
    and share their work lists. These are planned outside the launches, since an engine plans once
    for all layers."""
    if not bench.mode.runs:
        return []
    step = steps[0]
    work_lists = tuning.work_lists(
        Heads(*step.shape), step.q.device, max_tokens=len(step.q), max_sequences=len(step.queries)
    )
    works = [
        (work, programs)
        for work, programs in work_lists[None]
        if any(work.queries[0] <= q.query_tokens <= work.queries[1] for q in step.queries)
    ]
    for work, _ in works:
        plan(step.starts, step.contexts, work)

    def run(step: StepQueries, out: Tensor) -> None:
        for work, programs in works:
            step.run(work, programs, out)

    outs = [step.q.new_empty(len(step.q), step.q[0].numel()) for step in steps]
    return [functools.partial(run, step, out=out) for step, out in zip(steps, outs, strict=True)]
