"""Requests for the sampling and verification kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.recorded_logits import recorded_logits
from cbatch.runtime.sampling import noise
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

_TOP_PS = {False: torch.inf, True: 0.9}


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
    proposals = None
    if proposed:
        near = values[drafted] + normal(len(tokens), vocab).bfloat16()
        of_drafts = Rows(*(field[drafted].contiguous() for field in rows))
        draft_sample = draw(batch._replace(logits=near, rows=of_drafts), noise.DRAFT)
        drafts = batch.drafts._replace(tokens=draft_sample.tokens[:, 0].contiguous())
        batch, proposals = (
            batch._replace(drafts=drafts),
            Proposals(near, None, draft_sample, ones * 0),
        )
    return VerifyCase(batch, starts, proposals)
