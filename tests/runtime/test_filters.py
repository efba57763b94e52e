"""Filters against a slow version of their definition: ties, bans, and which logits count as
finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cbatch.runtime.cpu import greedy
from cbatch.runtime.cpu.greedy import greedy_drafts, greedy_tokens
from cbatch.runtime.sampling.filters import Filters, filtered_probs
from tests.runtime.marks import has_compiler
from tests.runtime.reference import slow_filter


def make_filters(rows) -> Filters:
    t, k, p, m = zip(*rows, strict=True)
    return Filters(
        torch.tensor(t, dtype=torch.float32),
        torch.tensor(k, dtype=torch.int64),
        torch.tensor([x if x < 1 else math.inf for x in p], dtype=torch.float32),
        torch.tensor(m, dtype=torch.float32),
    )


@pytest.mark.parametrize(("vocab", "spread"), [(40, 2.0), (1500, 0.3)])
def test_filters_follow_their_definition(vocab, spread):
    """Vocabularies are small and large; cuts fall among the leading tokens and beyond them."""
    rng = np.random.default_rng(1)
    rows = [
        (t, k, p, m)
        for t in (0.3, 1.0, 2.0)
        for k in (1, 5, 30, vocab // 2, vocab)
        for p in (0.05, 0.6, 0.95, 1.0)
        for m in (0.0, 0.05, 1.0)
    ]
    logits = np.round(rng.normal(size=(len(rows), vocab)) * spread, 1)  # many ties
    got = filtered_probs(torch.from_numpy(logits).float(), make_filters(rows)).numpy()
    on_edge = 0
    for i, row in enumerate(rows):
        want = np.array(slow_filter(logits[i].tolist(), *row))
        # A cumulative mass that meets top_p to the last bit may keep or drop one token.
        differ = int(((got[i] > 0) != (want > 0)).sum())
        on_edge += differ
        assert differ <= 1, row
        assert np.abs(got[i] - want).max() < 1e-5 + differ * want[want > 0].min(), row
    assert on_edge <= len(rows) // 50


def test_ties_at_the_edges_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]]).repeat(2, 1)
    filters = make_filters([(1.0, 3, 1.0, 0.0), (1.0, 5, 0.4, 0.0)])
    kept = filtered_probs(logits, filters) > 0
    assert kept.tolist() == [[True, True, False, True, False], [False, True, False, False, False]]


def test_tiny_temperature_and_forbidden_tokens_stay_finite():
    logits = torch.tensor([[-math.inf, 90.0, 89.0], [5.0, -math.inf, 5.0]])
    probs = filtered_probs(logits, Filters(torch.full((2,), 1e-30), None, None, None))
    assert probs.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]


def test_a_row_has_the_same_bits_in_any_company():
    rng = np.random.default_rng(2)
    vocab = 2000
    logits = torch.from_numpy(rng.normal(size=(9, vocab)).astype(np.float32))
    filters = make_filters(
        [(0.8, (vocab, 40, 900)[i % 3], (0.9, 1.0)[i % 2], 0.01) for i in range(9)]
    )
    together = filtered_probs(logits, filters)
    for i in range(9):
        alone = filtered_probs(logits[i : i + 1], Filters(*(f[i : i + 1] for f in filters)))
        assert torch.equal(alone[0], together[i])


def test_unfiltered_row_keeps_its_tail_among_filtered_ones():
    logits = torch.zeros(2, 1000)
    logits[:, 0] = 30.0  # the cumulative sum rounds to 1 long before the last token
    probs = filtered_probs(logits, make_filters([(1.0, 1000, 1.0, 0.0), (1.0, 2, 0.5, 0.0)]))
    assert (probs[0] > 0).all() and (probs[1] > 0).sum() == 1


@pytest.fixture(params=["compiled", "numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(greedy, "library", lambda: None)
    elif not has_compiler():
        pytest.skip("no C compiler, or not Linux")


@pytest.mark.usefixtures("kernels")
def test_greedy_ties_and_what_is_finite():
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, math.nan, 9.0], [3.0, 1.0, -math.inf]])
    tokens, finite = greedy_tokens(logits)
    assert tokens.tolist() == [1, 1, 0] and finite.tolist() == [True, False, False]
    assert greedy_drafts(logits)[1].tolist() == [True, False, True]
    huge = torch.full((1, 64), 3e38)  # the sum overflows, the terms are finite
    assert greedy_tokens(huge)[1].tolist() == [True]
    assert greedy_tokens(torch.tensor([[math.inf, -math.inf]]))[1].tolist() == [False]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocab", [1, 63, 1024, 5003])
def test_the_greedy_choice_is_the_first_of_the_highest(vocab: int):
    """It may be in any vector or after the last whole one, on one thread or on several."""
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-40, 40, size=(200, vocab)).astype(np.float32)
    at = rng.integers(vocab, size=200)
    logits[np.arange(200), at] = 41
    for row, value in ((3, math.nan), (5, math.inf), (7, -math.inf)):
        logits[row, rng.integers(vocab)] = value
    logits[9] = -math.inf
    tokens, finite = greedy_tokens(torch.from_numpy(logits))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert finite.tolist() == np.isfinite(logits).all(axis=1).tolist()
