"""Bytes of logits that a verdict reads, counted by address, for logits like a model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from bench.gpu.recorded_logits import recorded_logits
from cbatch.runtime.sampling import noise
from tests.gpu_proofs.interpreted.accesses import Addresses
from tests.triton_kernels.interpreter.batches import noise_of
from tests.triton_kernels.interpreter.light import without_overflow_checks
from triton_kernels.sampling.inputs import (
    COUPLED,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.sampling.launch import draw
from triton_kernels.verification.kernel import VerifyOutput, verify_logits

VOCAB, DRAFTS, COUNT = 16_384, 2, 8
# Temperature, top_k, top_p and min_p, used in turn.
USUAL = ((0.8, VOCAB, 0.9, 0.0), (0.7, 20, 0.8, 0.0), (1.0, 50, torch.inf, 0.0))
USUAL += ((1.0, VOCAB, torch.inf, 0.05), (1.0, VOCAB, 0.95, 0.02))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_overflow_checks(monkeypatch)


def batch_of(mode: int, *, filtered: bool) -> tuple[LogitsBatch, Tensor]:
    """Return requests with likely drafts, and the first row of each."""
    counts = torch.full((COUNT,), DRAFTS)
    rows, starts = rows_of(counts, COUNT * (DRAFTS + 1))
    logits = recorded_logits(len(rows.requests), VOCAB)
    drafts = logits[rows.depths < DRAFTS].argmax(dim=1).int()
    filters = torch.tensor(USUAL if filtered else [(0.9, VOCAB, torch.inf, 0.0)])
    filters = filters[torch.arange(COUNT) % len(filters)].t().contiguous()
    requests = Requests(
        torch.full((COUNT,), mode, dtype=torch.int32),
        filters[0],
        filters[1].int(),
        filters[2],
        filters[3],
    )
    of_drafts = DraftTokens(drafts, DRAFTS * torch.arange(COUNT).int(), counts.int())
    where = noise_of(np.random.default_rng(5), COUNT)
    return LogitsBatch(logits, rows, requests, where, of_drafts, None), starts


@contextmanager
def reads_of(*watched: Tensor) -> Iterator[list[int]]:
    """Yield the bytes that launches within have read of each tensor."""
    real, counts = InterpreterBuilder.create_masked_load, [0] * len(watched)

    def load(builder: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        addresses = Addresses.of(ptrs, mask)
        for i, tensor in enumerate(watched):
            first, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
            inside = (addresses.at >= first) & (addresses.at < first + size)
            counts[i] += addresses.width * int(inside.sum())
        return real(builder, ptrs, mask, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", load)
        yield counts


def passes(
    batch: LogitsBatch, starts: Tensor, proposals: Proposals | None, *, filtered: bool
) -> tuple[VerifyOutput, list[float]]:
    """Return the verdict, and how often it reads the target's logits and those of drafts."""
    watched = (batch.logits,) if proposals is None else (batch.logits, proposals.logits)
    with reads_of(*watched) as counts:
        verdict = verify_logits(batch, starts, proposals, filtered=filtered)
    sizes = (each.numel() * each.itemsize for each in watched)
    return verdict, [count / size for count, size in zip(counts, sizes, strict=True)]


@pytest.mark.parametrize("mode", [COUPLED, REJECTION])
def test_one_pass_without_filters(mode: int) -> None:
    _, (target,) = passes(*batch_of(mode, filtered=False), None, filtered=False)
    assert 1 <= target < 1 + 1 / VOCAB  # and the logits of drafts once more


@pytest.mark.parametrize("mode", [COUPLED, REJECTION])
def test_two_passes_at_most_with_filters(mode: int) -> None:
    _, (target,) = passes(*batch_of(mode, filtered=True), None, filtered=True)
    assert 1 < target <= 2


def test_of_drawn_drafts_the_rejected_rows_are_read_once_more() -> None:
    batch, starts = batch_of(REJECTION, filtered=False)
    of_drafts = Rows(*(field[batch.rows.depths < DRAFTS] for field in batch.rows))
    near = recorded_logits(COUNT * DRAFTS, VOCAB, seed=1)
    near += 0.5 * batch.logits[batch.rows.depths < DRAFTS]
    dists = draw(batch._replace(logits=near, rows=of_drafts), noise.DRAFT)
    batch = batch._replace(drafts=batch.drafts._replace(tokens=dists.tokens[:, 0].contiguous()))
    proposals = Proposals(near, None, dists, torch.zeros(COUNT, dtype=torch.int32))
    verdict, (target, draft) = passes(batch, starts, proposals, filtered=False)
    again = int((verdict.num_accepted < DRAFTS).sum())
    assert again > 2
    assert target == pytest.approx(1 + again / len(batch.logits), abs=1 / VOCAB)
    assert draft == pytest.approx(again / len(near))
