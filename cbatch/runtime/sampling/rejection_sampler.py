"""Batched verification of ragged drafts, in two modes. In both modes every emitted token has the
target's distribution p.

*Rejection* (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative
decoding", Algorithm 1): draft x ~ q is accepted with probability min(1, p(x) / q(x)). The first
rejected draft is replaced by a draw from norm(max(0, p - q)). After a full acceptance one bonus
token is drawn from p. Of all rules that look at one draft at a time this rule accepts the most,
1 - TV(p, q), whatever q is.

*Coupled* (Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant
speculative decoding", arXiv 2408.07978): the target draws its own token at every position, with
noise that depends on the position alone. Drafts are accepted while they equal these tokens, so the
output is what the target would have drawn without drafts. A draft drawn from q with the *same*
noise is accepted with probability
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) >= (1 - TV) / (1 + TV).

p and q are the distributions *after* temperature, filters and logits processors, from which tokens
are sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.compiled.race import race_winners
from cbatch.runtime.sampling import noise
from triton_kernels.build.check import check_tensor


class NoiseRows(NamedTuple):
    """The noise coordinates of B rows: see `cbatch/core/request/noise.py`."""

    keys: Tensor  # int64 [B, 2]: low and high word of the seed
    choices: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]: absolute position of the first token to sample in the row


class Verdict(NamedTuple):
    num_accepted: Tensor  # int64 [B]
    next_tokens: Tensor  # int64 [B]: the replacement or the bonus token


def draw(
    probabilities: Tensor, rows: NoiseRows, purposes: Tensor | int, ids: Tensor | None = None
) -> Tensor:
    """Draw one token for each row by an exponential race: argmax of p_i / E_i, ties to the lowest
    id. Return int64 [B].

    `probabilities` is fp32 [B, V], not necessarily normalised. With `ids` int64 [V], ascending,
    column i belongs to token `ids[i]`, and all other tokens have probability 0.
    """
    if isinstance(purposes, int):
        purposes = torch.full_like(rows.positions, purposes)
    if ids is not None:
        token_ids = ids.expand(len(probabilities), -1)
        words = noise.words_of(rows.keys, rows.positions, rows.choices, purposes, token_ids)
        return ids[(probabilities / noise.exponential(words)).argmax(dim=-1)]
    if probabilities.device.type == "cpu":
        coordinates = (*rows.keys.unbind(1), rows.choices, rows.positions, purposes)
        winners = race_winners(probabilities, torch.stack(coordinates, dim=1))
        if winners is not None:
            return winners
    # Filters leave few tokens, so only their noise is computed. Sorted: ties go to the lowest id.
    width = max(1, int((probabilities > 0).sum(dim=-1).max()))  # 0 for a row of NaN
    if width * 8 > probabilities.shape[1]:
        words = noise.token_words(
            rows.keys, rows.positions, rows.choices, purposes, probabilities.shape[1]
        )
        return (probabilities / noise.exponential(words)).argmax(dim=-1)
    ids = probabilities.topk(width, dim=-1).indices.sort(dim=-1).values
    words = noise.words_of(rows.keys, rows.positions, rows.choices, purposes, ids)
    scores = probabilities.gather(1, ids) / noise.exponential(words)
    return ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)


def rejection_verify(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_drafts: Tensor,
    rows: NoiseRows,
) -> Verdict:
    """Verify the drafts of B rows, k_i = num_drafts[i] >= 0 for row i; rows are concatenated.

    target_probs fp32 [sum(k_i + 1), V]; draft_tokens int64 [sum(k_i)]; draft_probs fp32
    [sum(k_i), V], or None where every draft was chosen with certainty (greedy or n-gram drafts:
    q is one-hot); num_drafts int64 [B]. Raises ValueError naming the argument that does not fit.
    """
    check_rows(target_probs, draft_tokens, draft_probs, num_drafts, rows)
    if draft_tokens.numel() == 0:
        return Verdict(torch.zeros_like(num_drafts), draw(target_probs, rows, noise.BONUS))
    target_starts = (num_drafts + 1).cumsum(0) - (num_drafts + 1)
    draft_starts = num_drafts.cumsum(0) - num_drafts
    num_accepted = count_accepted(
        target_probs, draft_tokens, draft_probs, num_drafts, rows, target_starts, draft_starts
    )
    weights = target_probs[target_starts + num_accepted]
    rejected = num_accepted < num_drafts
    replaced = rejected.nonzero().squeeze(1)
    if replaced.numel():
        at = draft_starts[replaced] + num_accepted[replaced]
        q = None if draft_probs is None else draft_probs[at]
        weights[replaced] = residual_of(weights[replaced], q, draft_tokens[at])
    purposes = torch.where(rejected, noise.RESIDUAL, noise.BONUS)
    at_last = rows._replace(positions=rows.positions + num_accepted)
    return Verdict(num_accepted, draw(weights, at_last, purposes))


def expected_accepted(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_drafts: Tensor,
    num_accepted: Tensor,
) -> Tensor:
    """Return the expected number of drafts that `rejection_verify` accepts, fp32 [B], for B rows of
    which it accepted `num_accepted`, int64 [B]. The other shapes are those of `rejection_verify`.

    A draft is accepted with probability 1 - TV(p, q) = sum_x min(p(x), q(x)) (Leviathan et al.
    2023, Theorem 3.5); a draft chosen with certainty, with p(draft). The sum runs over the
    positions that were tried, up to and including the first rejection. Whether a position is tried
    is known before its coin is drawn, so count minus sum is a martingale and both have the same
    mean (Doob's optional stopping). The sum does not depend on the coins and has the lower
    variance. Later positions must not enter the sum: the next step reuses their noise.
    """
    row = torch.repeat_interleave(num_drafts)
    flat = torch.arange(row.numel(), device=row.device)
    depth = flat - (num_drafts.cumsum(0) - num_drafts)[row]
    tried = (depth <= num_accepted[row]).nonzero().squeeze(1)
    flat, row, depth = flat[tried], row[tried], depth[tried]
    at = flat + row  # `target_probs` has one row more for every earlier row of the batch
    if draft_probs is None:
        chance = target_probs[at, draft_tokens[flat]]
    else:
        p = target_probs[at]
        chance = torch.minimum(p, draft_probs[flat], out=p).sum(dim=-1).clamp_(max=1)
    by_depth = chance.new_zeros(num_drafts.numel(), int(num_drafts.max()))
    by_depth[row, depth] = chance
    return by_depth.sum(dim=1)


def residual_of(p: Tensor, q: Tensor | None, rejected: Tensor) -> Tensor:
    """Return the weights of the token that replaces `rejected` int64 [N]: max(0, p - q), fp32
    [N, V], not normalised.

    Where p and q are nearly equal, rounding may leave no mass. Then the result is p."""
    residual = p.scatter(1, rejected[:, None], 0.0) if q is None else (p - q).clamp_(min=0)
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)


def count_accepted(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_drafts: Tensor,
    rows: NoiseRows,
    target_starts: Tensor,
    draft_starts: Tensor,
) -> Tensor:
    """Return the length of the leading run of accepted drafts of each row, int64 [B]."""
    flat = torch.arange(draft_tokens.numel(), device=draft_tokens.device)
    row = torch.repeat_interleave(num_drafts)
    depth = flat - draft_starts[row]
    p = target_probs[target_starts[row] + depth, draft_tokens]
    words = noise.scalar_words(
        rows.keys[row],
        rows.positions[row] + depth,
        rows.choices[row],
        torch.full_like(depth, noise.ACCEPT),
    )
    threshold = noise.uniform(words)
    if draft_probs is not None:
        threshold = threshold * draft_probs[flat, draft_tokens]
    # u * q <= p with u in (0, 1]. p > 0 rejects a token that the target forbids.
    return leading_run((p > 0) & (threshold <= p), row, depth, num_drafts)


def coupled_verify(
    target_probs: Tensor, draft_tokens: Tensor, num_drafts: Tensor, rows: NoiseRows
) -> Verdict:
    """Verify the drafts of B rows against the target's own tokens, drawn with `noise.COUPLED`.

    Shapes as for `rejection_verify`. Drafts may come from any drafter, but only drafts drawn with
    the same noise (`draw(q, rows, noise.COUPLED)`) are accepted often. Raises ValueError naming the
    argument that does not fit.
    """
    check_rows(target_probs, draft_tokens, None, num_drafts, rows)
    if draft_tokens.numel() == 0:
        return Verdict(torch.zeros_like(num_drafts), draw(target_probs, rows, noise.COUPLED))
    lens = num_drafts + 1
    starts = lens.cumsum(0) - lens
    row = torch.repeat_interleave(lens)
    depth = torch.arange(row.numel(), device=row.device) - starts[row]
    token_rows = NoiseRows(rows.keys[row], rows.choices[row], rows.positions[row] + depth)
    target_tokens = draw(target_probs, token_rows, noise.COUPLED)
    drafted = depth < num_drafts[row]  # all but the last of each row
    agrees = target_tokens[drafted] == draft_tokens
    num_accepted = leading_run(agrees, row[drafted], depth[drafted], num_drafts)
    return Verdict(num_accepted, target_tokens[starts + num_accepted])


def leading_run(accepted: Tensor, row: Tensor, depth: Tensor, num_drafts: Tensor) -> Tensor:
    """Return how many leading drafts of each row are accepted, int64 [B]. `accepted` bool
    [sum(k_i)] belongs to the drafts at `depth` of `row`; there is at least one draft."""
    shape = (num_drafts.numel(), int(num_drafts.max()))
    by_depth = torch.zeros(shape, dtype=torch.int64, device=accepted.device)
    by_depth[row, depth] = accepted.to(torch.int64)
    return by_depth.cumprod(dim=1).sum(dim=1)


def check_rows(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_drafts: Tensor,
    rows: NoiseRows,
) -> None:
    batch, drafts, vocab = num_drafts.numel(), draft_tokens.numel(), target_probs.shape[-1]
    for name, tensor, dtype, shape in (
        ("num_drafts", num_drafts, torch.int64, (batch,)),
        ("draft_tokens", draft_tokens, torch.int64, (drafts,)),
        ("target_probs", target_probs, torch.float32, (batch + drafts, vocab)),
        ("rows.keys", rows.keys, torch.int64, (batch, 2)),
        ("rows.choices", rows.choices, torch.int64, (batch,)),
        ("rows.positions", rows.positions, torch.int64, (batch,)),
        ("draft_probs", draft_probs, torch.float32, (drafts, vocab)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, dtype, shape)
