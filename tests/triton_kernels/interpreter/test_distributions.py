"""Filters keep the same tokens through lists that fit and lists that overflow, for flat rows and
peaked ones, whatever end is guessed first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from cbatch.runtime.sampling import noise
from tests.triton_kernels.interpreter.batches import SMALL, kept_by, noise_of, random_batch
from tests.triton_kernels.sampling_reference import sample_reference, shaped_logits, weights_of
from triton_kernels.sampling import distributions, launch, order
from triton_kernels.sampling.inputs import (
    COUPLED,
    GREEDY,
    REJECTION,
    Distributions,
    DraftTokens,
    LogitsBatch,
    Requests,
    Rows,
)
from triton_kernels.sampling.launch import Tiling

VOCAB = 90
SHORT = SMALL._replace(list_tokens=16, chunk=2)
MARGIN = 1 << 14  # elements

pytestmark = [
    pytest.mark.usefixtures("device", "unchecked_sums"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def drawn(batch: LogitsBatch, tiling: Tiling = SMALL) -> Distributions:
    """Draw drafts; masses are exact for weighed rows."""
    return launch.draw(batch, noise.DRAFT, tiling)


@pytest.fixture(scope="module")
def batch() -> LogitsBatch:
    return random_batch(np.random.default_rng(12), 8, VOCAB, shaped=False)[0]


@pytest.fixture(scope="module")
def result(batch: LogitsBatch) -> Distributions:
    return drawn(batch)


def differ(mine: Distributions, other: Distributions, batch: LogitsBatch) -> int:
    """Return the number of rows that differ in the token or, where weighed, in the distribution."""
    weighed = batch.requests.modes[batch.rows.requests.long()] >= REJECTION
    rows = mine.tokens[:, 0] != other.tokens[:, 0]
    rows |= weighed & ((mine.cuts != other.cuts) | (mine.floats != other.floats).any(dim=1))
    return int(rows.sum())


def test_distributions_are_those_of_the_reference(
    batch: LogitsBatch, result: Distributions
) -> None:
    x = shaped_logits(batch.logits, batch.rows, batch.drafts, batch.shaping)
    weights = weights_of(x, batch.rows, batch.requests)
    weighed = batch.requests.modes[batch.rows.requests.long()] >= REJECTION
    assert torch.equal(kept_by(result, batch, x)[1][weighed], (weights > 0)[weighed])
    torch.testing.assert_close(
        result.floats[weighed, 1], weights.sum(dim=1)[weighed], rtol=1e-6, atol=0
    )
    assert torch.equal(result.tokens[:, 0], sample_reference(*batch, noise.DRAFT))
    of_token = weights.gather(1, result.tokens[:, :1].long()).squeeze(1) / weights.sum(dim=1)
    torch.testing.assert_close(result.floats[weighed, 2], of_token[weighed], rtol=1e-5, atol=0)


def test_lists_that_overflow_change_no_bit(batch: LogitsBatch, result: Distributions) -> None:
    assert differ(drawn(batch, SHORT), result, batch) == 0


@triton.jit
def next_to_nothing(pieces, target, by_count, PIECE):
    return order.key_of(distributions.tl.max(pieces[1], axis=0) * 1e-3) << 32


@triton.jit
def far_too_far(pieces, target, by_count, PIECE):
    return order.key_of(distributions.tl.max(pieces[1], axis=0) * 90.0) << 32


@pytest.mark.parametrize(
    "guess, tiling",
    [(next_to_nothing, SHORT), (next_to_nothing, SMALL), (far_too_far, SHORT)],
)
def test_a_wrong_guess_changes_no_bit(
    batch: LogitsBatch,
    result: Distributions,
    guess: object,
    tiling: Tiling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = batch._replace(logits=batch.logits[:10], rows=Rows(*(field[:10] for field in batch.rows)))
    monkeypatch.setattr(distributions, "guess_cut", guess)
    assert differ(drawn(few, tiling), Distributions(*(field[:10] for field in result)), few) == 0


def test_memory_holds_poison_before_and_margins_stay(
    batch: LogitsBatch, result: Distributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = []

    def poisoned(size: tuple[int, ...] | int, *, dtype: torch.dtype, device: object) -> Tensor:
        poison = torch.nan if dtype.is_floating_point else -(1 << 30)
        count = int(np.prod(size))
        buffers.append(torch.full((count + 2 * MARGIN,), poison, dtype=dtype))
        return buffers[-1][MARGIN:-MARGIN].view(size)

    with monkeypatch.context() as patch:
        patch.setattr(launch.torch, "empty", poisoned)
        assert differ(drawn(batch, SHORT), result, batch) == 0
    margins = torch.cat([torch.cat((b[:MARGIN], b[-MARGIN:])).double() for b in buffers])
    assert len(buffers) > 8 and (margins.isnan() | (margins == -(1 << 30))).all()


def rows_with(logits: Tensor, mode: int, top_k: int, top_p: float, min_p: float) -> LogitsBatch:
    """Return a request for each row of logits, at temperature 1."""
    count = len(logits)
    one, zeros = torch.ones(count), torch.zeros(count, dtype=torch.int32)
    requests = Requests(zeros + mode, one, zeros + top_k, one * top_p, one * min_p)
    rows = Rows(torch.arange(count, dtype=torch.int32), zeros)
    where = noise_of(np.random.default_rng(3), count)
    return LogitsBatch(logits, rows, requests, where, DraftTokens(zeros, zeros, zeros), None)


@pytest.mark.parametrize("mode, tiling", [(COUPLED, SHORT), (REJECTION, SHORT), (REJECTION, SMALL)])
def test_ties_of_a_flat_row_stay_up_to_an_id(mode: int, tiling: Tiling) -> None:
    """The filters are half of the mass, a number of tokens, both, and tokens as likely as the
    best."""
    kept_by_filters = {
        (200, 0.5, 0.0): 100,
        (7, torch.inf, 0.0): 7,
        (80, 0.25, 0.1): 20,
        (200, 1.5, 1.0): 200,
    }
    for (top_k, top_p, min_p), kept in kept_by_filters.items():
        batch = rows_with(torch.full((1, 200), 3.0), mode, top_k, top_p, min_p)
        result = drawn(batch, tiling)
        assert (result.tokens[:, 0] < kept).all()
        assert torch.equal(result.tokens[:, 0], sample_reference(*batch, noise.DRAFT))
        if mode != COUPLED:
            assert (result.floats[:, 1] == kept).all()


def test_a_flat_row_that_would_fill_the_list() -> None:
    """The mass of the `limit` likeliest tokens, in units of the list, would add one to their
    count."""
    limit = launch.TILING.list_tokens
    result = drawn(rows_with(torch.zeros(1, limit), REJECTION, limit, 0.5, 0.0), launch.TILING)
    assert result.floats[0, 1] == limit // 2
    assert result.cuts[0] == limit // 2


def test_a_vocabulary_of_eighteen_bits() -> None:
    """The last token can win, be kept and be cut."""
    vocab = 1 << 18
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[0, vocab - 1] = 12.0
    greedy = drawn(rows_with(logits[:1], GREEDY, vocab, torch.inf, 0.0), launch.TILING)
    assert greedy.tokens[0, 0] == vocab - 1
    batch = rows_with(logits, REJECTION, vocab, 0.4, 0.0)
    result = drawn(batch, launch.TILING)
    weights = weights_of(logits.float(), batch.rows, batch.requests)
    kept = kept_by(result, batch, logits.float())[1]
    assert 1 < int(kept[0].sum()) < int(kept[1].sum())
    assert kept[0, vocab - 1] and ((kept != (weights > 0)).sum(dim=1) <= 1).all()
    torch.testing.assert_close(result.floats[:, 1], weights.sum(dim=1), rtol=1e-5, atol=0)


NARROW = SMALL._replace(pieces=1)  # rows have several tiles


def collecting(tiling: Tiling) -> Tiling:
    return tiling._replace(collect=launch.CompileOptions(4))


@pytest.mark.parametrize("tiling", [SMALL, SHORT, NARROW, NARROW._replace(list_tokens=16)])
@pytest.mark.parametrize("purpose", [noise.DRAFT, noise.BONUS])
def test_lists_made_by_tiles_change_no_bit(
    batch: LogitsBatch, tiling: Tiling, purpose: int
) -> None:
    without = launch.draw(batch, purpose, tiling)
    assert differ(launch.draw(batch, purpose, collecting(tiling)), without, batch) == 0


@triton.jit
def forgets_every_token(scratch):
    pass


def test_lists_made_by_tiles_have_shaped_tokens_and_a_short_list_shows(
    batch: LogitsBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaped = random_batch(np.random.default_rng(34), 10, 42)[0]

    def results(tiling: Tiling) -> Distributions:
        return drawn(shaped._replace(logits=shaped.logits.clone()), tiling)

    assert differ(results(collecting(NARROW)), results(NARROW), shaped) == 0
    monkeypatch.setattr(launch, "collect_kernel", forgets_every_token)
    assert differ(drawn(batch, collecting(NARROW)), drawn(batch, NARROW), batch) > 3
