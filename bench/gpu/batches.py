"""Random requests for the sampling and verification kernels: ragged drafts, filters, shaping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from triton_kernels.sampling import (
    COUPLED,
    GREEDY,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    LogitsShaping,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.sampling.inputs import IN_PROMPT, IS_STOP

MODES = (GREEDY, COUPLED, REJECTION)


class VerifyCase(NamedTuple):
    """A step to verify. `starts` int32 [B]: the first row of logits of each request."""

    batch: LogitsBatch
    starts: Tensor
    proposals: Proposals | None

    def to(self, device: torch.device) -> VerifyCase:
        return VerifyCase(*(_moved(field, device) for field in self))


def _moved(value: object, device: torch.device) -> object:
    """Tensors of nested named tuples, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return type(value)(*(_moved(field, device) for field in value))
    return value


def make_case(
    num_drafts: Sequence[int],
    vocab: int,
    *,
    device: torch.device,
    mode: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    filters: bool = False,
    shaped: bool = False,
    proposed: bool = False,
    seed: int = 0,
) -> VerifyCase:
    """Requests with so many drafts each, in one mode or in all of them. Logits are random, drafts
    likely; with `proposed` the drafts' own logits are near the target's."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = torch.tensor(num_drafts, device=device)
    size, num_rows = len(counts), int((counts + 1).sum())
    rows, starts = rows_of(counts, num_rows)
    logits = _normal((num_rows, vocab), generator).mul_(2).to(dtype)
    drafted = rows.depths < counts[rows.requests.long()]
    tokens = logits[drafted].float().argmax(dim=-1).to(torch.int32)
    other = torch.randint(vocab, tokens.shape, generator=generator, device=device)
    guessed = torch.rand(tokens.shape, generator=generator, device=device) < 0.3
    tokens = torch.where(guessed, other.to(torch.int32), tokens)
    draft_starts = counts.cumsum(0) - counts
    drafts = DraftTokens(tokens, draft_starts.to(torch.int32), counts.to(torch.int32))
    batch = LogitsBatch(
        logits,
        rows,
        _requests(size, vocab, mode, filters, generator),
        _noise(size, generator),
        drafts,
        _shaping(size, vocab, generator) if shaped else None,
    )
    proposals = None
    if proposed:
        near = logits[drafted] + _normal((len(tokens), vocab), generator).to(dtype)
        certain = torch.zeros(size, dtype=torch.int32, device=device)
        of_drafts = Rows(*(field[drafted].contiguous() for field in rows))
        proposals = Proposals(near, of_drafts, certain)
    return VerifyCase(batch, starts, proposals)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _requests(
    size: int, vocab: int, mode: int | None, filters: bool, generator: torch.Generator
) -> Requests:
    device = generator.device
    at = torch.arange(size, device=device)
    modes = at % len(MODES) if mode is None else torch.full_like(at, mode)
    uniform = torch.rand(4, size, generator=generator, device=device)
    temperatures = 0.6 + uniform[0]
    top_k = torch.full_like(at, vocab)
    top_p, min_p = torch.full_like(uniform[0], torch.inf), torch.zeros_like(uniform[0])
    if filters:  # each in about half of the requests, so that all combinations occur
        few = 1 + (uniform[1] * min(vocab, 100)).long()
        top_k = torch.where(at % 2 == 0, few, top_k)
        top_p = torch.where(at // 2 % 2 == 0, 0.3 + 0.69 * uniform[2], top_p)
        min_p = torch.where(at // 4 % 2 == 0, 0.2 * uniform[3], min_p)
    return Requests(modes.to(torch.int32), temperatures, top_k.to(torch.int32), top_p, min_p)


def _noise(size: int, generator: torch.Generator) -> Noise:
    device = generator.device
    keys = torch.randint(2**32, (size, 2), generator=generator, device=device)
    choices = torch.zeros(size, dtype=torch.int64, device=device)
    positions = torch.randint(5000, (size,), generator=generator, device=device)
    return Noise(keys, choices, positions)


def _shaping(size: int, vocab: int, generator: torch.Generator, listed: int = 64) -> LogitsShaping:
    """`listed` tokens a request: an eighth each banned, of the prompt and stop tokens."""
    device = generator.device
    listed = min(listed, vocab // 2)
    shape = (size, listed)
    ids = torch.rand((size, vocab), generator=generator, device=device).topk(listed).indices
    kind = torch.randint(8, shape, generator=generator, device=device)
    bias = _normal(shape, generator).masked_fill(kind == 0, -torch.inf)
    counts = torch.randint(3, shape, generator=generator, device=device)
    marks = torch.where(kind == 1, IN_PROMPT, torch.where(kind == 2, IS_STOP, 0))
    plain = torch.ones((size, -(-vocab // 32) * 32), dtype=torch.int64, device=device)
    plain.scatter_(1, ids, 0)
    bits = (plain.view(size, -1, 32) << torch.arange(32, device=device)).sum(dim=-1)
    words = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    penalties = torch.tensor([1.2, 0.3, 0.1], device=device).repeat(size, 1)
    return LogitsShaping(
        words,
        ids.to(torch.int32),
        torch.full((size,), listed, dtype=torch.int32, device=device),
        bias,
        counts.to(torch.int32),
        marks.to(torch.int32),
        penalties,
        torch.arange(size, dtype=torch.int32, device=device) % 3,
    )
