"""The distributions of sampled rows: temperature, top-k, top-p and min-p."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Number of most likely tokens that are sorted: enough for most rows, and fast for all.
_LEADING_TOKENS = 256


class Filters(NamedTuple):
    """Sampling parameters of N logits rows. None: no row uses that filter."""

    temperature: Tensor  # fp32 [N], > 0
    top_k: Tensor | None  # int64 [N]; the vocabulary size where a row has none
    top_p: Tensor | None  # fp32 [N]; infinite where a row has none
    min_p: Tensor | None  # fp32 [N]


def filtered_probs(logits: Tensor, filters: Filters) -> Tensor:
    """Return the distributions to sample from: fp32 [N, V] of fp32 logits [N, V]."""
    return filtered_logits(logits, filters).softmax(dim=-1)


def filtered_logits(logits: Tensor, filters: Filters) -> Tensor:
    """Return the logarithm of `filtered_probs`, up to a constant in each row; -inf where a filter
    forbids a token.

    First temperature, then top-k, then top-p of the renormalised rest, then min-p relative to the
    most likely token. Tokens are cut in the order (-logit, id), so a tie goes to the lowest id.
    Every operation reads one row only.
    """
    # The maximum is subtracted first: a tiny temperature then gives -inf at most, never NaN.
    x = (logits - logits.amax(dim=-1, keepdim=True)) / filters.temperature[:, None]
    if filters.top_k is not None or filters.top_p is not None:
        x = _keep_top(x, filters)
    if filters.min_p is not None:
        # In fp64: the rounding of an fp32 logarithm may depend on its place in a vector.
        x = x.masked_fill(x < filters.min_p.double().log()[:, None], -torch.inf)
    return x


def _keep_top(x: Tensor, filters: Filters) -> Tensor:
    """Set the tokens of `x` that top-k or top-p removes to -inf. The maximum of `x` is 0.

    Nearly always the last kept token is among the first `_LEADING_TOKENS`, and the vocabulary need
    not be sorted. Whether a row is sorted completely depends on that row only.
    """
    rows, vocab = x.shape
    top_k, top_p = filters.top_k, filters.top_p
    if top_k is None:
        top_k = torch.full((rows,), vocab, device=x.device)
    if top_p is None:
        top_p = torch.full((rows,), torch.inf, device=x.device)
    if vocab <= 2 * _LEADING_TOKENS:
        return _cut_sorted(x, top_k, top_p)
    values, ids, edge = _leading(x)
    # Not exp: softmax works row by row; a library's exp of a whole matrix may not.
    mass = x.softmax(dim=-1).gather(1, ids).cumsum(dim=-1)
    nucleus = torch.where(top_k <= _LEADING_TOKENS, top_p * _mass_of(mass, top_k), top_p)
    keep = _keep_mask(mass, top_k, nucleus)
    count = keep.sum(dim=-1)
    # A row is complete if the mass that top-p refers to is known, and the leading tokens include
    # the last kept token and all tokens that tie with it.
    known = (top_k <= _LEADING_TOKENS) | (top_k >= vocab)
    last = values.gather(1, count[:, None] - 1).squeeze(1)
    complete = known & (count < _LEADING_TOKENS) & (last > edge)
    cut = torch.full_like(x, -torch.inf)
    cut.scatter_(1, ids, values.masked_fill(~keep, -torch.inf))
    unfiltered = (top_k >= vocab) & torch.isinf(top_p)
    cut = torch.where(unfiltered[:, None], x, cut)
    incomplete = (~complete & ~unfiltered).nonzero().squeeze(1)
    if incomplete.numel():
        cut[incomplete] = _cut_sorted(x[incomplete], top_k[incomplete], top_p[incomplete])
    return cut


def _cut_sorted(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    mass = x.softmax(dim=-1).gather(1, ids).cumsum(dim=-1)
    keep = _keep_mask(mass, top_k, top_p * _mass_of(mass, top_k))
    return torch.empty_like(x).scatter_(1, ids, values.masked_fill_(~keep, -torch.inf))


def _leading(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading tokens of each row in the order (-x, id): values, ids, the next value."""
    values, ids = x.topk(_LEADING_TOKENS + 1, dim=-1)
    edge = values[:, -1]
    ids, order = ids[:, :-1].sort(dim=-1)
    values = values[:, :-1].gather(1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), edge


def _mass_of(mass: Tensor, top_k: Tensor) -> Tensor:
    """Return the mass of the first `top_k` tokens of each row, read from the cumulative `mass`. A
    sum of one long row may be shared among threads, and its bits would depend on their number."""
    last = top_k.clamp(max=mass.shape[-1]) - 1
    return mass.gather(1, last[:, None]).squeeze(1)


def _keep_mask(mass: Tensor, top_k: Tensor, nucleus: Tensor) -> Tensor:
    """Return which tokens are kept, for tokens in descending order with cumulative `mass`. A kept
    token has a rank below top_k, and less than `nucleus` of mass before it. The first is kept."""
    rank = torch.arange(mass.shape[-1], device=mass.device)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    keep = (rank < top_k[:, None]) & (before < nucleus[:, None])
    keep[:, 0] = True
    return keep
