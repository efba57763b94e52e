"""Verification that is not lossless: flaws that earlier systems shipped, each with its test.

    flaw                                               where
    A1 rollback that keeps the rejected token          here; test_broken_variants: rollback;
                                                       test_executor: kv_is_that_of_the_emitted
    A2 filters on the target's law or the draft's      test_broken_variants: unfiltered_q;
       alone                                           test_statistics: a_wrong_q
    A3 `u <= p / q` at p = 0; residual without mass    test_broken_variants: p_of_zero, zero_mass
    B1 a threshold in place of a coin, and p in place  here
       of the residual
    C1 q made up: 1 / V                                here
    D1 the target's best token or none; token 0 if     here
       there is no other

Here they are planted in a whole engine: scheduler, executor, draft model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as verify
from cbatch.runtime.sampling.rejection_sampler import NoiseRows
from tests.runtime import test_executor
from tests.runtime.test_statistics import FILTERS, VOCAB, Z_BOUND, sample, z_against


def keeps_rejected(self: TorchExecutor, rows: Any, verified: Any) -> Any:
    """A1: after a rejection the history continues from the draft; the replacement is only
    emitted."""
    drafted = self.table.tokens[rows.slots].copy()
    tokens, counts, kv_lens = ADVANCE(self, rows, verified)
    if rows.wants.all():
        rejected = (counts <= rows.num_drafts).nonzero()[0]
        last = self.table.num_tokens[rows.slots[rejected]] - 1
        self.table.tokens[rows.slots[rejected], last] = drafted[rejected, last]
    return tokens, counts, kv_lens


class _MadeUpQ(DraftModel):
    """C1: report that each draft was drawn with chance 1 / V."""

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.probs is not None
        return proposal._replace(probs=torch.full_like(proposal.probs, 1 / VOCAB))


def above_threshold(
    p: Tensor, x: Tensor, q: Tensor, k: Tensor, rows: NoiseRows, starts: Tensor, firsts: Tensor
) -> Tensor:
    """B1: no coin. A draft is accepted if p(y) / q(x) > 0.5, where y is a draw of the target's
    own."""
    row = torch.repeat_interleave(k)
    depth = torch.arange(len(x)) - firsts[row]
    at = starts[row] + depth
    noise_rows = NoiseRows(rows.keys[row], rows.choices[row], rows.positions[row] + depth)
    own = verify.draw(p[at], noise_rows, noise.BONUS)
    ratio = p[at, own] / q[torch.arange(len(x)), x]
    return verify.leading_run(ratio > 0.5, row, depth, k)


def best_or_none(
    p: Tensor, x: Tensor, q: Tensor, k: Tensor, rows: NoiseRows, starts: Tensor, firsts: Tensor
) -> Tensor:
    """D1: a draft is accepted if it is the target's likeliest token."""
    row = torch.repeat_interleave(k)
    depth = torch.arange(len(x)) - firsts[row]
    return verify.leading_run(p[starts[row] + depth].argmax(dim=1) == x, row, depth, k)


def zero_in_place_of_a_bonus(weights: Tensor, rows: NoiseRows, purpose: Any) -> Tensor:
    """D1: if no draft is left to check, the emitted token is number 0."""
    drawn: Tensor = DRAW(weights, rows, purpose)
    return torch.where(torch.as_tensor(purpose) == noise.BONUS, 0, drawn)


ADVANCE, DRAW = TorchExecutor.advance_rows, verify.draw
SAMPLER = "cbatch.runtime.sampling.rejection_sampler"
FLAWS: dict[str, tuple[tuple[str, Any], ...]] = {
    "A1 rollback keeps the rejected token": (
        ("cbatch.runtime.cpu.executor.TorchExecutor.advance_rows", keeps_rejected),
    ),
    "B1 threshold for a coin, p for the residual": (
        (f"{SAMPLER}.count_accepted", above_threshold),
        (f"{SAMPLER}.residual_of", lambda p, q, rejected: p),
    ),
    "C1 q of 1 / V": (("tests.runtime.engines.DraftModel", _MadeUpQ),),
    "D1 argmax match": ((f"{SAMPLER}.count_accepted", best_or_none),),
    "D1 token 0": ((f"{SAMPLER}.draw", zero_in_place_of_a_bonus),),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_of_verification_are_caught_by_the_joint_law_of_the_engine(flaw, monkeypatch):
    """z > 10 on the joint law of three tokens. For the correct engine it is below 5, except by
    chance in 6 of 10 million (see test_statistics, which has the same sample)."""
    for name, broken in FLAWS[flaw]:
        monkeypatch.setattr(name, broken)
    run = sample(lookahead="fixed:3")
    assert (run.accepted < run.drafted).any() and run.accepted.any()
    assert z_against(run, FILTERS[0]) > 2 * Z_BOUND


def test_flaw_a1_is_caught_by_comparing_kv_with_what_was_emitted(monkeypatch):
    """KV is compared after every step; the tokens alone would not show it."""
    monkeypatch.setattr(TorchExecutor, "advance_rows", keeps_rejected)
    with pytest.raises(AssertionError):
        test_executor.test_flaw_a1_kv_is_that_of_the_emitted_tokens(temperature=0.0)
