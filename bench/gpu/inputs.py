"""Inputs of kernels: ragged attention over scattered pages, requests to verify or sample, and
logits that were recorded from SmolLM2-135M over a text.

Random logits are nearly flat, so a nucleus holds half of the vocabulary. A model's logits are
peaked: with temperature 0.8 and top_p 0.9 the nuclei of the recorded rows hold 1 to 874 tokens,
half of them at most 9. Benchmarks time both. The rows are 15 tokens apart; of their sorted logits
the first 64 are stored, and 136 others at ranks in geometric progression.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.gpu.timing import Call, Query
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.sampling import noise
from triton_kernels.attention import Heads, attention, attention_reference, plan
from triton_kernels.sampling import (
    DraftTokens,
    LogitsBatch,
    Noise,
    Proposals,
    Requests,
    Rows,
    draw,
    rows_of,
)

_TABLE_MULTIPLE = 16  # entries of a table row, an alignment that kernels rely on
_TOP_PS = {False: torch.inf, True: 0.9}
MAX_ERROR = 2e-2  # relative, of an attention result
_DATA = Path(__file__).parent / "data" / "recorded_logits.npz"
ROWS, VOCAB = 64, 49_152  # of the recorded logits
_FIXED_RANKS = 1024  # first ranks, whose logits are equal for every vocabulary


class StepQueries(NamedTuple):
    """The queries of a step, and the location of their keys."""

    heads: Heads
    queries: Sequence[Query]
    k_pages: Tensor  # [pages, page_tokens, kv_heads, head_dim]
    v_pages: Tensor
    q: Tensor  # [T, kv_heads, group, head_dim], a view into a fused QKV projection
    tables: Tensor
    starts: Tensor
    contexts: Tensor

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)


def make_step(
    queries: Sequence[Query], heads: Heads, page_tokens: int, device: torch.device, seed: int = 0
) -> StepQueries:
    """Return a step in bf16, with scattered pages laid out like the engine's: a page of a head is
    contiguous memory."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-q.context_tokens // page_tokens) for q in queries]
    options = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    kv = torch.randn(heads.kv_heads, sum(counts), page_tokens, 2, heads.head_dim, **options)
    k_pages, v_pages = kv.permute(3, 1, 2, 0, 4)
    pages = torch.randperm(sum(counts), device=device, generator=generator).split(counts)
    width = -(-max(counts) // _TABLE_MULTIPLE) * _TABLE_MULTIPLE
    tables = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
    for table, own in zip(tables, pages, strict=True):
        table[: len(own)] = own
    lens = torch.tensor([0, *(q.query_tokens for q in queries)])
    fused = torch.randn(int(lens.sum()), heads.kv_heads, heads.group + 2, heads.head_dim, **options)
    return StepQueries(
        heads,
        queries,
        k_pages,
        v_pages,
        fused[:, :, : heads.group],
        tables,
        lens.cumsum(0).int().to(device),
        torch.tensor([q.context_tokens for q in queries], dtype=torch.int32, device=device),
    )


def launches(steps: Sequence[StepQueries], tuning: Tuning) -> list[Call]:
    """Return a launch for each step. The steps have equal lengths and share their work lists, which
    are planned here, since an engine plans once for all layers. A launch has the keyword `out`."""
    first, device = steps[0], steps[0].q.device
    work_lists = tuning.work_lists(
        first.heads, device, max_tokens=len(first.q), max_sequences=len(first.queries)
    )
    works = [
        (work, programs)
        for work, programs in work_lists[None]
        if any(work.queries[0] <= q.query_tokens <= work.queries[1] for q in first.queries)
    ]
    for work, _ in works:
        plan(first.starts, first.contexts, work)

    def run(step: StepQueries, out: Tensor) -> None:
        inputs = step.q, step.k_pages, step.v_pages, step.tables
        for work, programs in works:
            attention(*inputs, out, work, scale=step.scale, num_programs=programs)

    outs = [step.q.new_empty(len(step.q), step.q[0].numel()) for step in steps]
    return [partial(run, step, out=out) for step, out in zip(steps, outs, strict=True)]


def check(call: Call) -> None:
    """Raise ArithmeticError if one of `launches` computes something else, so that it is not
    timed."""
    (step,), out = call.args, call.keywords["out"].fill_(torch.nan)
    call()
    k, v, where = step.k_pages.float(), step.v_pages.float(), (step.tables, step.starts)
    expected = attention_reference(step.q, k, v, *where, step.contexts, scale=step.scale).flatten(1)
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < MAX_ERROR:
        raise ArithmeticError(f"relative error {error:.1e}, {MAX_ERROR} allowed")


@functools.cache
def profiles(vocab: int) -> NDArray[np.float32]:
    """Return the sorted logits of every recorded row, [ROWS, vocab], descending.

    The first 1,024 ranks keep their logits; the others are stretched to the vocabulary. Raises
    ValueError for a vocabulary of fewer than 2,048 tokens.
    """
    if vocab < 2 * _FIXED_RANKS:
        raise ValueError(f"vocab: {vocab} tokens, at least {2 * _FIXED_RANKS} are needed")
    rank = np.arange(vocab, dtype=np.float64)
    stretch = (VOCAB - 1 - _FIXED_RANKS) / (vocab - 1 - _FIXED_RANKS)
    rank[_FIXED_RANKS:] = _FIXED_RANKS + (rank[_FIXED_RANKS:] - _FIXED_RANKS) * stretch
    with np.load(_DATA) as file:  # some ranks, from 0 to VOCAB - 1, and their logits by row
        at, knots = np.log1p(rank), np.log1p(file["ranks"])
        return np.stack([np.interp(at, knots, row) for row in file["logits"]]).astype(np.float32)


def recorded_logits(
    rows: int, vocab: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Return logits [rows, vocab] in bf16. Row i has the recorded profile i modulo 64, with its
    tokens in random order."""
    generator = torch.Generator(device).manual_seed(seed)
    sorted_logits = torch.from_numpy(profiles(vocab)).to(device, torch.bfloat16)
    logits = torch.empty((rows, vocab), dtype=torch.bfloat16, device=device)
    for at in range(rows):
        order = torch.randperm(vocab, generator=generator, device=device)
        logits[at, order] = sorted_logits[at % ROWS]
    return logits


class VerifyCase(NamedTuple):
    """A step to verify. `starts` int32 [B] is the first logits row of each request."""

    batch: LogitsBatch
    starts: Tensor
    proposals: Proposals | None


def make_case(
    num_drafts: Sequence[int],
    vocab: int,
    *,
    device: torch.device,
    mode: int,
    filters: bool = False,
    proposed: bool = False,
    logits: str = "random",
    seed: int = 0,
) -> VerifyCase:
    """Make one request per entry of `num_drafts`, at temperature 0.8. `mode` is a value of
    `Requests.modes`; `filters` sets top_p 0.9. Logits are bf16, random or recorded. Drafts
    are mostly the argmax; with `proposed` they are drawn from logits near the target's."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = torch.tensor(num_drafts, device=device)
    size, num_rows = len(counts), int((counts + 1).sum())
    rows, starts = rows_of(counts, num_rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator, device=device)

    if logits == "recorded":
        values = recorded_logits(num_rows, vocab, device=device, seed=seed)
    else:
        values = normal(num_rows, vocab).mul_(2).bfloat16()
    drafted = rows.depths < counts[rows.requests.long()]
    tokens = values[drafted].argmax(dim=-1)
    tokens = torch.where(integers(10, len(tokens)) < 3, integers(vocab, len(tokens)), tokens)
    draft_starts = counts.cumsum(0) - counts
    ones = torch.ones(size, dtype=torch.int32, device=device)
    batch = LogitsBatch(
        values,
        rows,
        Requests(ones * mode, ones * 0.8, ones * vocab, ones * _TOP_PS[filters], ones * 0.0),
        Noise(integers(1 << 32, size, 2), ones.long() * 0, integers(5000, size)),
        DraftTokens(tokens.int(), draft_starts.int(), counts.int()),
        None,
    )
    if not proposed:
        return VerifyCase(batch, starts, None)
    near = values[drafted] + normal(len(tokens), vocab).bfloat16()
    of_drafts = Rows(*(field[drafted].contiguous() for field in rows))
    drawn = draw(batch._replace(logits=near, rows=of_drafts), noise.DRAFT)
    drafts = batch.drafts._replace(tokens=drawn.tokens[:, 0].contiguous())
    return VerifyCase(batch._replace(drafts=drafts), starts, Proposals(near, None, drawn, ones * 0))
