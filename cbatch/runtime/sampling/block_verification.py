"""Rejection sampling by blocks: a row's drafts are accepted by their joint probability ratio.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024, "Block verification accelerates
speculative decoding" (arXiv 2403.10444), Algorithm 2. Given the drafts x_1 .. x_i, p and q are the
distributions of the next token of the target and of the drafter. Each x_{i+1} is drawn from q.

    c_0 = 1,  c_i = min(1, c_{i-1} p(x_i) / q(x_i))        the joint ratio           `_joint_ratios`
    R_i = sum_x max(0, c_i p(x) - q(x))                    the residual's mass
    h_i = R_i / (R_i + 1 - c_i),  h_k = c_k                the probability that coin i succeeds

The *last* draft whose coin succeeds is accepted, with all drafts before it. The next token is drawn
from norm(max(0, c_i p - q)), or from p after all k drafts. A draft may be accepted although its own
coin failed.

*Proof that the output has the distribution p.* (1) P(i or more accepted | x_1 .. x_i) = c_i. For
i = k this is the coin. By induction from i + 1 down to i:
    P(i + 1 or more | x_1 .. x_i) = sum_x q(x) c_{i+1} = sum_x min(c_i p(x), q(x)) = c_i - R_i
and coin i adds (1 - c_i + R_i) h_i = R_i. (2) So exactly i are accepted, given x_1 .. x_i, with
probability R_i. (3) After a prefix x_1 .. x_i with i or more accepted, the next token is y with
the mass
    R_i max(0, c_i p(y) - q(y)) / R_i + q(y) c_{i+1}(y)
        = max(0, c_i p(y) - q(y)) + min(c_i p(y), q(y)) = c_i p(y),
so its distribution is p. The proof allows any k, also one that varies, as long as x_1 .. x_i decide
whether another draft follows. By (1) i drafts survive with probability E[c_i], for every k >= i.

*Noise.* The number of accepted drafts depends on every draft and every coin of the block, also on
those after the last accepted draft. These later coins are known to have failed. Token-by-token
verification may use their noise again at the same positions in the next step; here the next coins
would then fail too often. One coin for the whole block would not help, since the drafts carry
information, too. So the noise of drafts and coins depends on the position and on the depth in the
block (`noise.at_depth`): no two blocks of a sequence share it. A replacement or bonus is drawn only
once at each position. Each block's noise is thus independent of everything known before the block.
By (3) the distribution is exact over any number of steps, and k may depend on the past.

A block of one draft gets the same result, bit for bit, as from `rejection_verify` in
`rejection_sampler.py`. Drafts chosen with certainty are accepted equally often by both functions
(c_i is then the product of their p), and never more often.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.runtime.sampling import noise, rejection_sampler
from cbatch.runtime.sampling.rejection_sampler import NoiseRows, draw


class BlockVerdict(NamedTuple):
    num_accepted: Tensor  # int64 [B]
    next_tokens: Tensor  # int64 [B]: the replacement or the bonus token
    expected_accepted: Tensor  # fp32 [B]: see `_expected`


class DraftPositions(NamedTuple):
    """The position of every draft, as int64 vectors over all drafts of the step."""

    row: Tensor  # ascending
    depth: Tensor  # from 0
    at: Tensor  # the row of `target_probs` that accepts or rejects the draft


def block_verify(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_drafts: Tensor,
    rows: NoiseRows,
) -> BlockVerdict:
    """Verify the drafts of B rows as blocks. Shapes and errors as for
    `rejection_sampler.rejection_verify`. Sampled drafts must have used the noise of their depth
    (`noise.at_depth`).

    Where p is NaN (no token may follow a draft) the block ends as if no more tokens had been
    drafted. The caller must detect an accepted draft that no token may follow."""
    rejection_sampler.check_rows(target_probs, draft_tokens, draft_probs, num_drafts, rows)
    if draft_tokens.numel() == 0:
        zeros = torch.zeros_like(num_drafts)
        return BlockVerdict(zeros, draw(target_probs, rows, noise.BONUS), zeros.to(torch.float32))
    row = torch.repeat_interleave(num_drafts)
    flat = torch.arange(row.numel(), device=row.device)
    drafts = DraftPositions(row, flat - (num_drafts.cumsum(0) - num_drafts)[row], flat + row)
    draft_p = target_probs[drafts.at, draft_tokens]
    draft_q = torch.ones_like(draft_p)
    if draft_probs is not None:
        draft_q = draft_probs[flat, draft_tokens]
    ratios = _joint_ratios(draft_p, draft_q, num_drafts, drafts)
    c_before = ratios[row, drafts.depth]
    masses = _masses(target_probs[drafts.at].mul_(c_before[:, None]), draft_tokens, draft_probs)
    passes = accepting_coins(c_before * draft_p, draft_q, ratios, masses, num_drafts, rows, drafts)
    accepts = torch.zeros_like(ratios, dtype=torch.int64)
    accepts[row, drafts.depth] = torch.where(passes, drafts.depth + 1, 0)
    num_accepted = accepts.amax(dim=1)
    following = _following(
        target_probs, draft_tokens, draft_probs, num_drafts, rows, num_accepted, ratios
    )
    expected = _expected(c_before, masses, num_accepted, drafts)
    return BlockVerdict(num_accepted, following, expected)


def _joint_ratios(
    draft_p: Tensor, draft_q: Tensor, num_drafts: Tensor, drafts: DraftPositions
) -> Tensor:
    """Return c_0 .. c_k of each row, fp32 [B, max k + 1]: 0 from the first draft that the target
    forbids. `draft_p` and `draft_q`: p and q of every draft."""
    shape = (num_drafts.numel(), int(num_drafts.max()))
    p, q = draft_p.new_zeros(shape), draft_p.new_ones(shape)
    p[drafts.row, drafts.depth], q[drafts.row, drafts.depth] = draft_p, draft_q
    ratios = draft_p.new_ones(shape[0], shape[1] + 1)
    for depth in range(shape[1]):
        weight = ratios[:, depth] * p[:, depth]
        ratio = torch.where(weight >= q[:, depth], 1.0, weight / q[:, depth])
        ratios[:, depth + 1] = torch.where(weight > 0, ratio, 0.0)  # False for NaN
    return ratios


def _masses(scaled: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> Tensor:
    """Return R of the prefix before each draft. `scaled` is c p and is overwritten. The sum is in
    double, so that the order of summation, which may depend on the batch, has no effect."""
    if draft_probs is None:
        scaled.scatter_(1, draft_tokens[:, None], 0.0)
    else:
        scaled.sub_(draft_probs).clamp_(min=0)
    return scaled.sum(dim=-1, dtype=torch.float64)


def accepting_coins(
    weights: Tensor,
    draft_q: Tensor,
    ratios: Tensor,
    masses: Tensor,
    num_drafts: Tensor,
    rows: NoiseRows,
    drafts: DraftPositions,
) -> Tensor:
    """Return whether the coin of each draft succeeds, bool. `weights` are c p of the drafts."""
    row, depth, _ = drafts
    words = noise.scalar_words(
        rows.keys[row],
        rows.positions[row] + depth,
        rows.choices[row],
        noise.ACCEPT + noise.DEPTH_STEP * depth,
    )
    u = noise.uniform(words)
    # u <= h, with u in (0, 1]. For c = 1 this holds whatever the rounding error of R.
    mass = masses.roll(-1)  # R of the prefix that ends with the draft
    passes = u * (mass + (1 - ratios[row, depth + 1])) <= mass
    ends = (depth + 1 == num_drafts[row]) | mass.isnan()
    return (weights > 0) & torch.where(ends, u * draft_q <= weights, passes)


def _following(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_drafts: Tensor,
    rows: NoiseRows,
    num_accepted: Tensor,
    ratios: Tensor,
) -> Tensor:
    """Return the token after the accepted drafts of each row, int64 [B]."""
    draft_starts = num_drafts.cumsum(0) - num_drafts
    batch_rows = torch.arange(num_drafts.numel(), device=num_drafts.device)
    weights = target_probs[draft_starts + batch_rows + num_accepted]
    rejected = num_accepted < num_drafts
    replaced = rejected.nonzero().squeeze(1)
    if replaced.numel():
        at = draft_starts[replaced] + num_accepted[replaced]
        q = None if draft_probs is None else draft_probs[at]
        scaled = weights[replaced] * ratios[replaced, num_accepted[replaced], None]
        weights[replaced] = rejection_sampler.residual_of(scaled, q, draft_tokens[at])
    purposes = torch.where(rejected, noise.RESIDUAL, noise.BONUS)
    at_last = rows._replace(positions=rows.positions + num_accepted)
    return draw(weights, at_last, purposes)


def _expected(
    c_before: Tensor, masses: Tensor, num_accepted: Tensor, drafts: DraftPositions
) -> Tensor:
    """Return the expected number of accepted drafts, fp32 [B].

    Given x_1 .. x_i, and that i or more are accepted, one more is accepted with probability
    1 - R_i / c_i, by (1). The sum runs over i up to the number accepted. Count minus sum is a
    martingale in i, so both have the same mean, and the sum has the lower variance. With c = 1
    throughout the result equals `rejection_sampler.expected_accepted`."""
    tried = drafts.depth <= num_accepted[drafts.row]
    chances = 1 - (masses / c_before).clamp(max=1)
    total = chances.new_zeros(num_accepted.numel())
    total.index_add_(0, drafts.row[tried], chances[tried])
    return total.to(torch.float32)
