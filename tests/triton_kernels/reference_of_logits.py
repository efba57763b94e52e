"""Verification from a target's logits in plain torch, the reference of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.runtime.sampling import rejection_sampler as verify
from tests.triton_kernels.sampling_reference import shaped_logits, weights_of
from triton_kernels.sampling.inputs import (
    COUPLED,
    GREEDY,
    REJECTION,
    LogitsBatch,
    Proposals,
    Rows,
)


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
