"""Verification from logits gives the verdicts of the CPU's sampler on the same noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from cbatch.runtime.sampling import noise
from tests.triton_kernels.interpreter.batches import (
    SMALL,
    proposals_for,
    proposals_of,
    random_batch,
)
from tests.triton_kernels.sampling_reference import verify_reference
from triton_kernels.sampling import launch, order
from triton_kernels.sampling.inputs import (
    COUPLED,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.verification import kernel as verify_logits
from triton_kernels.verification.kernel import VerifyOutput
from triton_kernels.verification.kernel import verify_logits as verify

pytestmark = [
    pytest.mark.usefixtures("device", "unchecked_sums"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def decide(
    batch: LogitsBatch, proposals: Proposals | None, *, starts_of: Tensor | None = None
) -> VerifyOutput:
    """Verify without changing the logits. `starts_of`: drafts of the requests that have rows."""
    batch = batch._replace(logits=batch.logits.clone())
    counts = batch.drafts.counts if starts_of is None else starts_of
    starts = rows_of(counts.long(), len(batch.logits))[1]
    return verify(batch, starts, proposals, SMALL, filtered=True)


def test_filtered_rows_are_those_of_the_reference() -> None:
    """With the same noise all tokens are equal; every outcome of a verdict occurs."""
    rng = np.random.default_rng(43)
    batch, _ = random_batch(rng, 64, 45, shaped=False)
    batch, proposals = proposals_for(rng, batch)
    assert len(batch.logits) >= 200
    verdict = decide(batch, proposals)
    for mine, reference in zip(verdict, verify_reference(batch, proposals), strict=True):
        assert torch.equal(mine.long(), reference)
    counts, accepted = batch.drafts.counts, verdict.num_accepted
    for mode in (COUPLED, REJECTION):
        of = batch.requests.modes == mode
        assert (of & (accepted == counts) & (counts > 1)).any() and (of & (counts == 0)).any()
        assert (of & (accepted > 0) & (accepted < counts)).any()
        assert (of & (accepted == 0) & (counts > 0)).any()
        for certain in (proposals.certain > 0, proposals.certain == 0):
            assert (of & certain & (accepted > 0)).any() and (
                of & certain & (accepted < counts)
            ).any()


@pytest.mark.parametrize("proposed", [True, False])
def test_shaped_rows_are_those_of_the_reference(proposed: bool) -> None:
    rng = np.random.default_rng(21)
    batch, _ = random_batch(rng, 10, 30, dtype=torch.bfloat16)
    batch, proposals = proposals_for(rng, batch)
    drawn = proposals if proposed else None
    for mine, others in zip(decide(batch, drawn), verify_reference(batch, drawn), strict=True):
        assert torch.equal(mine.long(), others)


def test_rows_that_are_not_finite_void_their_request_alone() -> None:
    rng = np.random.default_rng(22)
    batch, _ = random_batch(rng, 12, 30, filters=False, shaped=False)
    batch, proposals = proposals_for(rng, batch)
    before = decide(batch, proposals)
    row = int((batch.rows.depths == 2).nonzero()[0])
    hit = int(batch.rows.requests[row])
    batch.logits[row] = torch.nan
    after = decide(batch, proposals)
    others = torch.arange(12) != hit
    assert after.finite[hit] == 0 and (after.finite[others] == 1).all()
    for then, now in zip(before, after, strict=True):
        assert torch.equal(then[others], now[others])
    assert ((after.next_tokens >= 0) & (after.next_tokens < 30)).all()


def test_rows_of_padding_change_nothing() -> None:
    rng = np.random.default_rng(25)
    batch, _ = random_batch(rng, 10, 30, filters=False, shaped=False)
    count = len(batch.logits)
    rows, _ = rows_of(batch.drafts.counts.long(), count + 5)
    padded = torch.cat((batch.logits, torch.full((5, 30), torch.nan)))
    padded_batch = batch._replace(logits=padded, rows=rows)
    for mine, plain in zip(decide(padded_batch, None), decide(batch, None), strict=True):
        assert torch.equal(mine, plain)


def test_equal_distributions_leave_no_residual_and_still_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p = q except for round-off, and a draft is rejected nevertheless: the distribution is p
    itself."""
    rng = np.random.default_rng(23)
    batch, _ = random_batch(rng, 24, 30, filters=False, shaped=False)
    batch, proposals = proposals_for(rng, batch)
    drafted = batch.rows.depths < batch.drafts.counts[batch.rows.requests.long()]
    rows = Rows(*(field[drafted] for field in batch.rows))
    dists = launch.draw(batch._replace(logits=batch.logits[drafted], rows=rows), noise.DRAFT, SMALL)
    proposals = Proposals(batch.logits[drafted], None, dists, proposals.certain)
    monkeypatch.setattr(verify_logits, "ratio_accepts", never)
    ratio = (batch.requests.modes == REJECTION) & (batch.drafts.counts > 0)
    ratio &= proposals.certain == 0
    tokens = decide(batch, proposals).next_tokens[ratio]
    plain = batch._replace(drafts=batch.drafts._replace(counts=0 * batch.drafts.counts))
    monkeypatch.setattr(order, "BONUS", order.RESIDUAL)
    drawn = decide(plain, None, starts_of=batch.drafts.counts).next_tokens
    assert torch.equal(tokens, drawn[ratio])
    assert ratio.sum() > 5


@triton.jit
def never(threshold, p):
    return p < 0.0


def test_a_forbidden_draft_is_refused_whatever_its_own_chance() -> None:
    """p = 0, and q * u rounds to 0 as well."""
    logits = torch.tensor([[0.0, 300.0], [0.0, 0.0]])
    zeros, one = torch.zeros(1, dtype=torch.int32), torch.ones(1)
    requests = Requests(zeros + REJECTION, one, zeros + 2, one * torch.inf, one * 0)
    where = Noise(torch.zeros(1, 2).long(), zeros.long(), zeros.long())
    rows, drafts = rows_of(zeros.long() + 1, 2)[0], DraftTokens(zeros, zeros, zeros + 1)
    batch = LogitsBatch(logits, rows, requests, where, drafts, None)
    proposals = proposals_of(batch, logits[:1], Rows(zeros, zeros), zeros)
    assert decide(batch, proposals).num_accepted.tolist() == [0]
