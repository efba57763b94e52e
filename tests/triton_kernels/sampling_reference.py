"""The sampling kernels in plain torch: sorts, loops over rows, and probabilities; and verification
from a target's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as verify
from triton_kernels.sampling.inputs import (
    COUPLED,
    GREEDY,
    IN_PROMPT,
    IS_STOP,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    LogitsShaping,
    Noise,
    Proposals,
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


def verify_reference(
    batch: LogitsBatch, proposals: Proposals | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify as `triton_kernels.verification.kernel.verify_logits`, by
    `cbatch.runtime.sampling.rejection_sampler`.

    Returns the number of accepted drafts, the next token, and whether every logit was finite, int64
    [B] each. There is no padding, and drafts are contiguous.
    """
    logits, rows, requests, where, drafts, shaping = batch
    x = shaped_logits(logits, rows, drafts, shaping)
    p, q = normalised(weights_of(x, rows, requests)), None
    if proposals is not None:
        drafted = rows.depths < drafts.counts[rows.requests.long()]
        drawn_from = Rows(rows.requests[drafted], rows.depths[drafted])
        x_q = _proposed_logits(batch, proposals, drawn_from)
        q = normalised(weights_of(x_q, drawn_from, requests))
        sure = proposals.certain[drawn_from.requests.long()] > 0
        q[sure] = torch.nn.functional.one_hot(drafts.tokens.long(), q.shape[1]).float()[sure]
    of, counts = rows.requests.long(), drafts.counts.long()
    greedy = torch.nn.functional.one_hot(x.argmax(dim=-1), x.shape[1]).float()
    verdicts = {
        mode: _verdict(mode, batch, greedy if mode == GREEDY else p, q, requests.modes == mode)
        for mode in (GREEDY, COUPLED, REJECTION)
    }
    accepted, following = torch.zeros_like(counts), torch.zeros_like(counts)
    for mode, verdict in verdicts.items():
        accepted[requests.modes == mode], following[requests.modes == mode] = verdict
    finite = torch.ones_like(counts).scatter_reduce_(
        0, of, logits.isfinite().all(dim=-1).long(), "amin"
    )
    return accepted, following, finite


def _proposed_logits(batch: LogitsBatch, proposals: Proposals, rows: Rows) -> Tensor:
    """Return the logits of drafts after shaping, fp32 [M, V], minus infinity where forbidden."""
    x = proposals.logits.float()
    x[proposals.logits == torch.finfo(proposals.logits.dtype).min] = -torch.inf
    shaping, drafts = batch.shaping, batch.drafts
    if shaping is not None:
        assert proposals.listed is not None
        for row, listed, b, depth in zip(
            x, proposals.listed, *torch.stack(rows).tolist(), strict=True
        ):
            count, start = int(shaping.num_listed[b]), int(drafts.starts[b])
            ids = torch.cat((shaping.listed[b, :count], drafts.tokens[start : start + depth]))
            values = listed[: len(ids)]
            there = values > torch.finfo(torch.float32).min
            row[ids[there].long()] = values[there]
    return x


def _verdict(
    mode: int, batch: LogitsBatch, p: Tensor, q: Tensor | None, chosen: Tensor
) -> verify.Verdict:
    """Return the verdict for the requests `chosen`, bool [B]. A greedy distribution is one-hot, and
    coupled like any other."""
    counts = batch.drafts.counts.long()
    drafted = chosen[torch.repeat_interleave(counts)]
    tokens = batch.drafts.tokens.long()[drafted]
    p, where = p[chosen[batch.rows.requests.long()]], batch.noise
    rows = verify.NoiseRows(where.keys[chosen], where.choices[chosen], where.positions[chosen])
    if not chosen.any():
        return verify.Verdict(counts[chosen], counts[chosen])
    if mode in (GREEDY, COUPLED):
        return verify.coupled_verify(p, tokens, counts[chosen], rows)
    q = None if q is None else q[drafted]
    return verify.rejection_verify(p, tokens, q, counts[chosen], rows)


def normalised(weights: Tensor) -> Tensor:
    """Return probabilities, fp32 [N, V]."""
    mass = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(mass > 0, mass, 1.0)
