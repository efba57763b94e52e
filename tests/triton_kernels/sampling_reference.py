"""The sampling kernels in plain torch: sorts, loops over rows, and probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from triton_kernels.sampling.inputs import (
    COUPLED,
    GREEDY,
    IN_PROMPT,
    IS_STOP,
    DraftTokens,
    LogitsShaping,
    Noise,
    Requests,
    Rows,
)


def shaped_logits(
    logits: Tensor, rows: Rows, drafts: DraftTokens, shaping: LogitsShaping | None
) -> Tensor:
    """Return shaped logits, fp32 [N, V], minus infinity where forbidden."""
    x = logits.float().clone()
    x[~x.isfinite()] = -torch.inf
    if shaping is not None:
        for i, (b, depth) in enumerate(zip(*torch.stack(rows).tolist(), strict=True)):
            start = int(drafts.starts[b])
            _shape(x[i], b, depth, drafts.tokens[start : start + depth].long(), shaping)
    return x


def _shape(x: Tensor, b: int, depth: int, drafted: Tensor, s: LogitsShaping) -> None:
    used = int(s.num_listed[b])
    ids, marks = s.listed[b, :used].long(), s.marks[b, :used]
    words = s.plain[b].repeat_interleave(32)[: len(x)]
    plain = (words >> (torch.arange(len(x)) % 32)) & 1 > 0
    listed = x[ids] + s.bias[b, :used]
    x[~plain] = -torch.inf
    x[ids] = listed
    if int(s.min_tokens[b]) > depth:
        x[ids[marks & IS_STOP > 0]] = -torch.inf
    count = torch.zeros(len(x), dtype=torch.int64).scatter_add_(0, ids, s.counts[b, :used].long())
    count.scatter_add_(0, drafted, torch.ones_like(drafted))
    seen = count > 0
    seen[ids[marks & IN_PROMPT > 0]] = True
    repetition, presence, frequency = s.penalties[b]
    x.copy_(torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x))
    x -= frequency * count + torch.where(count > 0, presence, 0.0)


def weights_of(x: Tensor, rows: Rows, requests: Requests) -> Tensor:
    """Return the filtered weights exp((x - max) / temperature), fp32 [N, V], not normalised."""
    inverse = (1.0 / requests.temperatures).clamp(max=torch.finfo(torch.float32).max)
    of = rows.requests.long()
    maxima = x.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    y, ids = ((maxima - x) * inverse[of, None]).sort(dim=-1, stable=True)
    weights = torch.exp(-y)
    kept = torch.arange(x.shape[1]) < requests.top_k[of, None]
    nucleus = (weights * kept).sum(dim=-1) * requests.top_p[of]
    before = (weights * kept).cumsum(dim=-1) - weights * kept
    kept &= before < nucleus[:, None]
    kept &= y <= -requests.min_p[of, None].log()
    kept[:, 0] = True
    return torch.zeros_like(x).scatter_(1, ids, weights * kept)


def sample_reference(
    logits: Tensor,
    rows: Rows,
    requests: Requests,
    where: Noise,
    drafts: DraftTokens,
    shaping: LogitsShaping | None,
    purpose: int,
) -> Tensor:
    """`triton_kernels.sampling.launch.sample` in plain torch."""
    x = shaped_logits(logits, rows, drafts, shaping)
    scores = weights_of(x, rows, requests) / exponentials(
        rows, requests, where, purpose, x.shape[1]
    )
    greedy = requests.modes[rows.requests.long()] == GREEDY
    return torch.where(greedy, x.argmax(dim=-1), scores.argmax(dim=-1)).to(torch.int32)


def exponentials(rows: Rows, requests: Requests, where: Noise, purpose: int, vocab: int) -> Tensor:
    """Return exponential noise, fp32 [N, V]: COUPLED noise for coupled requests, else that of
    `purpose`."""
    of = rows.requests.long()
    modes = requests.modes[of]
    purposes = torch.where(modes == COUPLED, noise.COUPLED, purpose)
    positions = where.positions[of] + rows.depths
    words = noise.token_words(where.keys[of], positions, where.choices[of], purposes, vocab)
    return noise.exponential(words)
