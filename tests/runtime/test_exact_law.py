"""The law of three tokens, exactly: drafts and branches are enumerated, noise is bisected.

Rejection: the chance to accept a draft and the distribution of its replacement are measured in the
sampler, then summed over every draft and branch. Coupled: the distribution of the race is measured,
and every possible draft is shown to leave the tokens unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as sampler
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    coupled_verify,
    draw,
    rejection_verify,
)

VOCAB, LENGTH = 4, 3
KINDS = ("dense", "zeros", "equal", "disjoint", "one_hot", "certain")
BRANCHES = [  # every draft of k = 0, 1, 2 tokens, and the number of accepted ones
    (drafts, accepted)
    for k in range(LENGTH)
    for drafts in itertools.product(range(VOCAB), repeat=k)
    for accepted in range(k + 1)
]


class Models(NamedTuple):
    """Distributions of the next token after each last token, fp32 [VOCAB, VOCAB]. The first token
    is drawn as if it followed token 0."""

    target: Tensor
    draft: Tensor


def make_models(kind: str) -> Models:
    rng = np.random.default_rng(5)
    eye = torch.eye(VOCAB)[torch.from_numpy(rng.integers(0, VOCAB, VOCAB))]
    logits = rng.normal(size=(2, VOCAB, VOCAB)) * 1.5
    if kind == "zeros":
        logits[:, :, 1:][rng.random((2, VOCAB, VOCAB - 1)) < 0.4] = -np.inf
    if kind == "disjoint":
        logits[0, :, :2] = logits[1, :, 2:] = -np.inf
    target, draft = torch.from_numpy(logits).softmax(-1).to(torch.float32)
    if kind == "equal":
        draft = target.clone()
    return Models(target, eye if kind in ("one_hot", "certain") else draft)


def exact(dists: Tensor) -> np.ndarray:
    """Return distributions in float64, normalised."""
    wide = dists.double().numpy()
    normal: np.ndarray = wide / wide.sum(axis=-1, keepdims=True)
    return normal


def law(target: Tensor, length: int, last: int = 0) -> np.ndarray:
    """Return the law of the next `length` tokens: float64 [VOCAB] * length."""
    p = exact(target)
    dist = p[last] if length else np.ones(())
    for _ in range(length - 1):
        dist = dist[..., None] * p
    return dist


def rows_for(count: int) -> NoiseRows:
    zeros = torch.zeros(count, dtype=torch.int64)
    return NoiseRows(torch.stack((torch.arange(count), zeros), dim=1), zeros, zeros)


def share_of_words(holds: Callable[[Tensor], Tensor], count: int) -> np.ndarray:
    """Return the share of the 2**32 words for which `holds(words)`; it holds up to a threshold."""
    low = torch.zeros(count, dtype=torch.int64)
    high = torch.full_like(low, 1 << 32)
    while bool((low < high).any()):
        middle = (low + high) // 2
        yes = holds(middle)
        low, high = torch.where(yes, middle + 1, low), torch.where(yes, high, middle)
    shares: np.ndarray = low.double().numpy() / 2**32
    return shares


# --- rejection ------------------------------------------------------------------------------------


def accept_chances(patch: pytest.MonkeyPatch, models: Models, certain: bool) -> np.ndarray:
    """Return the implemented chance that each draft is accepted: float64 [last token, draft]."""
    x, ones = torch.arange(VOCAB).repeat(VOCAB), torch.ones(VOCAB**2, dtype=torch.int64)
    p, q = (dists.repeat_interleave(VOCAB, dim=0) for dists in models)
    with_bonus = p.repeat_interleave(2, dim=0)

    def accepts(words: Tensor) -> Tensor:
        patch.setattr(noise, "scalar_words", lambda *_: words)
        verdict = rejection_verify(with_bonus, x, None if certain else q, ones, rows_for(len(x)))
        return verdict.num_accepted > 0

    with patch.context() as patch:
        return share_of_words(accepts, len(x)).reshape(VOCAB, VOCAB)


def next_dists(patch: pytest.MonkeyPatch, models: Models, certain: bool) -> np.ndarray:
    """Return the distribution of the token after each branch, all in one ragged batch."""
    seen: list[Tensor] = []

    def capture(weights: Tensor, rows: NoiseRows, purposes: Tensor) -> Tensor:
        seen.append(weights)
        return weights.argmax(dim=-1)

    accepted = torch.tensor([count for _, count in BRANCHES])
    with patch.context() as patch:
        patch.setattr(sampler, "draw", capture)
        patch.setattr(sampler, "count_accepted", lambda *_: accepted)
        rejection_verify(
            models.target[[last for drafts, _ in BRANCHES for last in (0, *drafts)]],
            torch.tensor([token for drafts, _ in BRANCHES for token in drafts]),
            None if certain else models.draft[[x for d, _ in BRANCHES for x in (0, *d)[:-1]]],
            torch.tensor([len(drafts) for drafts, _ in BRANCHES]),
            rows_for(len(BRANCHES)),
        )
    return exact(seen[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_and_branch_sum_to_the_law(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The law is right when a step drafts k = 0, 1 or 2 and plain decoding follows. A draft is
    drawn and accepted with probability min(p, q)."""
    models, certain = make_models(kind), kind == "certain"
    accept, q = accept_chances(monkeypatch, models, certain), exact(models.draft)
    overlap = np.minimum(exact(models.target), q)
    assert np.abs(np.where(q > 0, accept * q, 0) - overlap).max() < 2e-6
    laws = np.zeros((LENGTH, *(VOCAB,) * LENGTH))
    following = next_dists(monkeypatch, models, certain)
    for (drafts, accepted), dist in zip(BRANCHES, following, strict=True):
        chance = 1.0
        for depth, (last, token) in enumerate(itertools.pairwise((0, *drafts))):
            chance *= q[last, token]
            if depth <= accepted:
                chance *= accept[last, token] if depth < accepted else 1 - accept[last, token]
        for token in range(VOCAB) if chance else ():
            tail = law(models.target, LENGTH - accepted - 1, token)
            laws[len(drafts)][(*drafts[:accepted], token)] += chance * dist[token] * tail
    for k in range(LENGTH):
        assert np.abs(laws[k] - law(models.target, LENGTH)).max() < 3e-6, f"k = {k}"


# --- coupled --------------------------------------------------------------------------------------

NODES = 256


def race_dist(patch: pytest.MonkeyPatch, p: Tensor) -> np.ndarray:
    """Return the implemented distribution of `draw` for one row of chances `p`: float64 [vocab].

    Token i wins if it beats every other, and given its noise the others are independent. The chance
    to lose to j alone is found by bisection over the word of j. It is integrated over the word of i
    by Gauss-Legendre in v with 1 - u = v**4, which is smooth at both ends.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    v = (nodes + 1) / 2
    own = torch.from_numpy((1 - v**4) * 2**32).to(torch.int64).clamp_(max=noise.MASK32)
    dist = np.zeros(len(p))
    for i in range(len(p)):
        wins = np.ones(NODES)
        for j in {*range(len(p))} - {i}:
            pair = torch.zeros_like(p)
            pair[i], pair[j] = p[i], p[j]

            def loses(words: Tensor, i: int = i, j: int = j, pair: Tensor = pair) -> Tensor:
                grid = torch.zeros(NODES, len(p), dtype=torch.int64)
                grid[:, i], grid[:, j] = own, words
                patch.setattr(sampler, "race_winners", lambda *_: None)
                patch.setattr(noise, "token_words", lambda *_: grid)
                return draw(pair.repeat(NODES, 1), rows_for(NODES), noise.COUPLED) == j

            wins *= 1 - share_of_words(loses, NODES)
        dist[i] = np.sum(wins * 4 * v**3 * weights / 2)
    return dist


@pytest.mark.parametrize("p", [(0.7, 0.3), (0.5, 0.0, 0.5), (0.02, 0.08, 0.9), (0.0, 1.0, 0.0)])
def test_the_race_has_the_distribution_it_is_given(
    monkeypatch: pytest.MonkeyPatch, p: tuple[float, ...]
) -> None:
    assert np.abs(race_dist(monkeypatch, torch.tensor(p)) - p).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_moves_a_coupled_token(kind: str) -> None:
    """Every draft of k = 0, 1, 2 tokens, in one ragged batch, is compared with plain decoding."""
    target = make_models(kind).target
    drafts = [x for k in range(LENGTH) for x in itertools.product(range(VOCAB), repeat=k)]
    p = target[[last for row in drafts for last in (0, *row)]]
    x = torch.tensor([token for row in drafts for token in row])
    num_drafts = torch.tensor([len(row) for row in drafts])
    seen = set()
    for key in range(50):
        one = torch.ones(1, dtype=torch.int64)
        rows = NoiseRows(torch.tensor([[key, 1]]), 0 * one, 10 * one)
        plain = [0]
        for depth in range(LENGTH):
            where = rows._replace(positions=rows.positions + depth)
            plain.append(int(draw(target[plain[-1:]], where, noise.COUPLED)))
        del plain[0]
        seen.add(tuple(plain))
        many = NoiseRows(*(field.repeat_interleave(len(drafts), dim=0) for field in rows))
        verdict = coupled_verify(p, x, num_drafts, many)
        for row, accepted, last in zip(drafts, *torch.stack(verdict).tolist(), strict=True):
            assert [*row[:accepted], last] == plain[: accepted + 1]
        assert set(verdict.num_accepted.tolist()) == set(range(LENGTH))
    assert len(seen) > 2
