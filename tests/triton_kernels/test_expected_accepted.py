"""The expected number of accepted drafts is exact, unbiased, and varies less than the count.

|z| < 5 fails by chance in 6 of 10 million tests; seeds are fixed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling.rejection_sampler import expected_accepted
from tests.triton_kernels.decoding import Z_BOUND, Decoder, Fixed, Policy
from tests.triton_kernels.test_policies import evidence_of
from tests.triton_kernels.test_verify import Batch, make_batch
from tests.triton_kernels.toy_models import ShapedModels, ToyModels, chain_models

COUNT = 30_000
CAUGHT = 2 * Z_BOUND


def expected(batch: Batch, draft_probs: Tensor | None) -> Tensor:
    verdict = batch.verify("rejection")
    return expected_accepted(
        batch.target, batch.drafts, draft_probs, batch.num_drafts, verdict.num_accepted
    )


def slowly(batch: Batch, row: int, *, certain: bool) -> float:
    one, total = batch.row(row), 0.0
    accepted = int(one.verify("rejection").num_accepted)
    for depth in range(min(accepted + 1, int(one.num_drafts))):
        p, q = one.target[depth].double(), one.draft_probs[depth].double()
        draft = one.drafts[depth]
        total += float(p[draft] if certain else torch.minimum(p, q).sum())
    return total


def one_hot(batch: Batch) -> Tensor:
    return torch.zeros_like(batch.draft_probs).scatter_(1, batch.drafts[:, None], 1.0)


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_it_is_the_sum_up_to_and_including_the_first_rejection(certain: bool) -> None:
    batch = make_batch("rejection", 60, seed=8)
    if certain:
        batch = batch._replace(draft_probs=one_hot(batch))
    sums = expected(batch, batch.draft_probs).tolist()
    slow = [slowly(batch, row, certain=certain) for row in range(60)]
    assert sums == pytest.approx(slow, abs=1e-6)
    verdict = batch.verify("rejection")
    k, accepted = batch.num_drafts, verdict.num_accepted
    assert (k == 0).any() and (accepted == k).any() and (accepted < k - 1).any()
    if certain:  # one-hot rows among others, or a step without any q, give the same number
        assert expected(batch, None).tolist() == sums


def test_it_is_never_more_than_was_tried() -> None:
    """Where p and q agree, round-off must not count as a draft."""
    batch = make_batch("rejection", 200, seed=9)
    depth = batch.each()[1]
    row = torch.repeat_interleave(batch.num_drafts + 1)
    same = batch._replace(draft_probs=batch.target[depth < batch.num_drafts[row]])
    sums = expected(same, same.draft_probs)
    tried = torch.minimum(same.verify("rejection").num_accepted + 1, same.num_drafts)
    assert (sums <= tried).all() and (sums > tried - 1e-5).all()


def gap_z(steps_of: Policy, models: ToyModels, *, leak: bool) -> tuple[float, float]:
    """Return z of the mean of count less sum over independent first steps, and the ratio of
    variances."""
    first = Decoder(models, "rejection", steps_of).run(COUNT, 1).steps[0]
    count = first.verdict.num_accepted.double()
    total = evidence_of(first, models, leak=leak).double()
    gap = count - total
    z = gap.mean() / (gap.std() / len(gap) ** 0.5)
    return float(z), float(total.var() / count.var())


@pytest.mark.parametrize("kind", ["chain", "shaped"])
@pytest.mark.parametrize("policy", [Policy, lambda: Fixed(1), lambda: Fixed(3)])
def test_the_mean_is_that_of_the_count_and_the_spread_less(policy: type[Policy], kind: str) -> None:
    models = chain_models() if kind == "chain" else ShapedModels()
    z, ratio = gap_z(policy(), models, leak=False)
    assert abs(z) < Z_BOUND
    assert ratio < 0.9


def test_a_sum_that_goes_on_after_the_first_rejection_is_biased() -> None:
    z, _ = gap_z(Fixed(3), chain_models(), leak=True)
    assert z < -CAUGHT
