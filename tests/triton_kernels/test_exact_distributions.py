"""T0: exact distributions, by enumeration of drafts and branches and by bisection over the noise.

Rejection: the chance to accept a draft and the distribution of its replacement are measured in the
implementation, then summed over every draft and branch. Coupled: the distribution of the race is
measured in the implementation, and every possible draft is shown to leave the tokens unchanged.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as verify
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    coupled_verify,
    draw,
    rejection_verify,
)
from tests.triton_kernels.decoding import DEEPEST
from tests.triton_kernels.toy_models import (
    ShapedModels,
    ToyModels,
    exact_dists,
    joint_dist,
    random_dists,
)

VOCAB, LENGTH = 4, DEEPEST + 1
KINDS = ["dense", "zeros", "equal", "disjoint", "one_hot", "certain", "shaped"]


def make_models(kind: str) -> ToyModels:
    if kind == "shaped":
        return ShapedModels(depth=LENGTH)
    rng = np.random.default_rng(5)
    target = random_dists(rng, VOCAB, VOCAB, "zeros" if kind == "zeros" else "dense")
    draft = random_dists(rng, VOCAB, VOCAB, kind if kind in ("zeros", "one_hot") else "dense")
    if kind == "equal":
        draft = target.clone()
    if kind == "disjoint":
        target[:, :2], draft[:, 2:] = 0, 0
        target, draft = (dists / dists.sum(dim=1, keepdim=True) for dists in (target, draft))
    if kind == "certain":  # chosen with certainty: q is one-hot, and not passed
        draft = torch.eye(VOCAB)[torch.from_numpy(rng.integers(0, VOCAB, VOCAB))]
    return ToyModels(target, draft)


def rows_for(count: int) -> NoiseRows:
    zeros = torch.zeros(count, dtype=torch.int64)
    return NoiseRows(torch.stack((torch.arange(count), zeros), dim=1), zeros, zeros)


def smallest_rejected(accepts: object, count: int) -> np.ndarray:
    """Return the share of the 2**32 words for which `accepts(words)` holds; it must hold up to a
    threshold."""
    low = torch.zeros(count, dtype=torch.int64)
    high = torch.full_like(low, 1 << 32)
    while bool((low < high).any()):
        middle = (low + high) // 2
        yes = accepts(middle)  # type: ignore[operator]
        low, high = torch.where(yes, middle + 1, low), torch.where(yes, high, middle)
    shares: np.ndarray = low.double().numpy() / 2**32
    return shares


# --- rejection ------------------------------------------------------------------------------------


def accept_probabilities(
    monkeypatch: pytest.MonkeyPatch, p: Tensor, x: Tensor, q: Tensor | None
) -> np.ndarray:
    """Return the implemented chance that each draft is accepted."""
    ones, target = torch.ones_like(x), p.repeat_interleave(2, dim=0)  # a bonus row after each

    def accepts(words: Tensor) -> Tensor:
        monkeypatch.setattr(noise, "scalar_words", lambda *_: words)
        return rejection_verify(target, x, q, ones, rows_for(len(x))).num_accepted > 0

    shares = smallest_rejected(accepts, len(x))
    monkeypatch.undo()
    return shares


def branch_dists(
    monkeypatch: pytest.MonkeyPatch,
    models: ToyModels,
    branches: list[tuple[tuple[int, ...], int]],
    certain: bool,
) -> np.ndarray:
    """Return the distribution of the token after each branch (drafts, number accepted), all in one
    ragged batch."""
    seen: list[Tensor] = []

    def capture(weights: Tensor, rows: NoiseRows, purposes: Tensor) -> Tensor:
        seen.append(weights)
        return weights.argmax(dim=-1)

    p, q, x = [], [], []
    for drafts, _ in branches:
        state = torch.tensor(0)
        p.append(models.target[state])
        for token in drafts:
            q.append(models.draft[state])
            x.append(token)
            state = models.after(state, torch.tensor(token))
            p.append(models.target[state])
    accepted = torch.tensor([count for _, count in branches])
    monkeypatch.setattr(verify, "draw", capture)
    monkeypatch.setattr(verify, "count_accepted", lambda *_: accepted)
    num_drafts = torch.tensor([len(drafts) for drafts, _ in branches])
    reported = None if certain else torch.stack(q)
    rows = rows_for(len(branches))
    rejection_verify(torch.stack(p), torch.tensor(x), reported, num_drafts, rows)
    monkeypatch.undo()
    return exact_dists(seen[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rejection_every_draft_and_branch_sum_to_the_joint_distribution(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The distribution of the first 4 tokens is right when a step drafts k in 0..3 and plain
    decoding follows."""
    models = make_models(kind)
    vocab, certain = models.vocab, kind == "certain"
    states = len(models.target)
    x = torch.arange(vocab).repeat(states)
    p, q = (dists.repeat_interleave(vocab, dim=0) for dists in (models.target, models.draft))
    accept = accept_probabilities(monkeypatch, p, x, None if certain else q)
    accept = accept.reshape(states, vocab)
    overlap = np.where(exact_dists(models.draft) > 0, accept * exact_dists(models.draft), 0)
    assert (
        np.abs(overlap - np.minimum(exact_dists(models.target), exact_dists(models.draft))).max()
        < 2e-6
    )
    branches = [
        (drafts, accepted)
        for k in range(LENGTH)
        for drafts in itertools.product(range(vocab), repeat=k)
        for accepted in range(k + 1)
    ]
    replace = branch_dists(monkeypatch, models, branches, certain)
    draft = exact_dists(models.draft)
    dists = np.zeros((LENGTH, *(vocab,) * LENGTH))
    for (drafts, accepted), dist in zip(branches, replace, strict=True):
        state, chance = torch.tensor(0), 1.0
        prefixes = [state]
        for depth, token in enumerate(drafts):
            agreed = accept[int(state), token] if depth < accepted else 1.0
            refused = 1 - accept[int(state), token] if depth == accepted else 1.0
            chance *= draft[int(state), token] * agreed * refused
            state = models.after(state, torch.tensor(token))
            prefixes.append(state)
        for token in range(vocab) if chance else ():
            after = int(models.after(prefixes[accepted], torch.tensor(token)))
            tail = joint_dist(models, LENGTH - accepted - 1, after)
            dists[len(drafts)][(*drafts[:accepted], token)] += chance * dist[token] * tail
    for k in range(LENGTH):
        assert np.abs(dists[k] - joint_dist(models, LENGTH)).max() < 3e-6, f"k = {k}"


# --- coupled --------------------------------------------------------------------------------------

NODES = 256


def race_dist(monkeypatch: pytest.MonkeyPatch, p: Tensor) -> np.ndarray:
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
        for j in range(len(p)):
            if j == i:
                continue
            pair = torch.zeros_like(p)
            pair[i], pair[j] = p[i], p[j]

            def loses(words: Tensor, i: int = i, j: int = j, pair: Tensor = pair) -> Tensor:
                grid = torch.zeros(NODES, len(p), dtype=torch.int64)
                grid[:, i], grid[:, j] = own, words
                monkeypatch.setattr(noise, "token_words", lambda *_: grid)
                return draw(pair.repeat(NODES, 1), rows_for(NODES), noise.COUPLED) == j

            wins *= 1 - smallest_rejected(loses, NODES)
        dist[i] = np.sum(wins * 4 * v**3 * weights / 2)
    monkeypatch.undo()
    return dist


@pytest.mark.parametrize("p", [(0.7, 0.3), (0.5, 0.0, 0.5), (0.02, 0.08, 0.9), (0.0, 1.0, 0.0)])
def test_coupled_the_race_has_the_distribution_it_is_given(
    monkeypatch: pytest.MonkeyPatch, p: tuple[float, ...]
) -> None:
    assert np.abs(race_dist(monkeypatch, torch.tensor(p)) - p).max() < 1e-6


def test_coupled_a_race_of_uniform_numbers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: uniform noise in place of exponential."""
    monkeypatch.setattr(noise, "exponential", noise.uniform)
    with monkeypatch.context() as patch:
        dist = race_dist(patch, torch.tensor((0.7, 0.3)))
    assert abs(dist[0] - 0.7) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_no_draft_moves_a_token(kind: str) -> None:
    """Every draft of every k in 0..3, in one ragged batch, is compared with plain decoding."""
    models = make_models(kind)
    drafts = [x for k in range(LENGTH) for x in itertools.product(range(models.vocab), repeat=k)]
    num_drafts = torch.tensor([len(x) for x in drafts])
    x = torch.tensor([token for row in drafts for token in row])
    states = []
    for row in drafts:
        states.append(torch.tensor(0))
        for token in row:
            states.append(models.after(states[-1], torch.tensor(token)))
    p = models.target[torch.stack(states)]
    seen = set()
    for key in range(50):
        one = torch.ones(1, dtype=torch.int64)
        rows = NoiseRows(torch.tensor([[key, 1]]), 0 * one, 10 * one)
        plain, state = [], torch.tensor([0])
        for depth in range(LENGTH):
            where = rows._replace(positions=rows.positions + depth)
            plain.append(int(draw(models.target[state], where, noise.COUPLED)))
            state = models.after(state, torch.tensor([plain[-1]]))
        seen.add(tuple(plain))
        many = NoiseRows(*(field.repeat_interleave(len(drafts), dim=0) for field in rows))
        verdict = coupled_verify(p, x, num_drafts, many)
        for row, accepted, last in zip(drafts, *torch.stack(verdict).tolist(), strict=True):
            assert [*row[:accepted], last] == plain[: accepted + 1]
        assert set(verdict.num_accepted.tolist()) == set(range(LENGTH))
    assert len(seen) > 3
