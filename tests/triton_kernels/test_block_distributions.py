"""Blocks: exact distributions of one step by enumeration, and of two steps with the noise that they
share.

T1 to T5 for this mode are in test_joint_distributions, policies in test_policies, the definition in
test_verify. Where samples decide, |z| < 5 fails by chance in 6 of 10 million and a broken variant
is caught at z > 10; seeds are fixed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling import block_verification as block
from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as verify
from cbatch.runtime.sampling.block_verification import block_verify
from tests.triton_kernels.decoding import (
    DEEPEST,
    Z_BOUND,
    Decoder,
    Fixed,
    joint_z,
    survival_chances,
)
from tests.triton_kernels.test_exact_distributions import (
    KINDS,
    LENGTH,
    VOCAB,
    make_models,
    rows_for,
    smallest_rejected,
)
from tests.triton_kernels.toy_models import ShapedModels, ToyModels, exact_dists, joint_dist

CAUGHT = 2 * Z_BOUND

# --- T0: one step ---------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Every draft of some lengths in one ragged batch, and the states after their prefixes."""

    drafts: list[tuple[int, ...]]
    states: list[list[Tensor]]
    p: Tensor
    q: Tensor
    x: Tensor
    num_drafts: Tensor

    @classmethod
    def of(cls, models: ToyModels, drafts: list[tuple[int, ...]]) -> Blocks:
        states = []
        for tokens in drafts:
            states.append([torch.tensor(0)])
            for token in tokens:
                states[-1].append(models.after(states[-1][-1], torch.tensor(token)))
        return cls(
            drafts,
            states,
            torch.stack([models.target[state] for row in states for state in row]),
            torch.stack([models.draft[state] for row in states for state in row[:-1]]),
            torch.tensor([token for tokens in drafts for token in tokens]),
            torch.tensor([len(tokens) for tokens in drafts]),
        )

    def verify(self, certain: bool) -> None:
        reported = None if certain else self.q
        block_verify(self.p, self.x, reported, self.num_drafts, rows_for(len(self.drafts)))


def coin_chances(blocks: Blocks, certain: bool) -> list[np.ndarray]:
    """Return the implemented chance that the coin of each draft passes."""
    passed: list[Tensor] = []
    coins = block.accepting_coins

    def capture(*arguments: object) -> Tensor:
        passed.append(coins(*arguments))  # type: ignore[arg-type]
        return passed[-1]

    def passes(words: Tensor) -> Tensor:
        patch.setattr(noise, "scalar_words", lambda *_: words)
        blocks.verify(certain)
        return passed.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "accepting_coins", capture)
        chances = smallest_rejected(passes, len(blocks.x))
    return np.split(chances, blocks.num_drafts.cumsum(0)[:-1].numpy())


def next_dists(blocks: Blocks, certain: bool) -> np.ndarray:
    """Return the distribution of the token after the first j drafts of each, given that j are
    accepted, j = 0..DEEPEST: [DEEPEST + 1, drafts, vocab]."""
    seen: list[Tensor] = []

    def capture(weights: Tensor, *_: object) -> Tensor:
        seen.append(weights)
        return weights.argmax(dim=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "draw", capture)
        for accepted in range(DEEPEST + 1):
            patch.setattr(
                block, "accepting_coins", lambda *given, j=accepted: given[-1].depth == j - 1
            )
            blocks.verify(certain)
    weights = torch.stack(seen).double().numpy()  # zero after a draft that p forbids
    mass = weights.sum(axis=-1, keepdims=True)
    dists: np.ndarray = weights / np.where(mass > 0, mass, 1.0)
    return dists


def accepted_dist(coins: np.ndarray) -> np.ndarray:
    """Return the distribution of the last coin that passes: P(0), .., P(k)."""
    fails = np.append(np.cumprod(1 - coins[::-1])[::-1], 1.0)
    return np.append(1.0, coins) * fails


def step_dist(models: ToyModels, certain: bool, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distribution of the first `LENGTH` tokens when a step drafts k and plain decoding
    follows, and the survival of 1..k drafts."""
    blocks = Blocks.of(models, list(itertools.product(range(models.vocab), repeat=k)))
    coins, following = coin_chances(blocks, certain), next_dists(blocks, certain)
    dist, survival = np.zeros((models.vocab,) * LENGTH), np.zeros(k)
    draft = exact_dists(models.draft)
    for i, (tokens, states) in enumerate(zip(blocks.drafts, blocks.states, strict=True)):
        drawn = np.prod([draft[int(s), x] for s, x in zip(states, tokens, strict=False)])
        if not drawn:
            continue
        chances = drawn * accepted_dist(coins[i])
        survival += np.cumsum(chances[::-1])[::-1][1:]
        for accepted in np.flatnonzero(chances).tolist():
            for token in range(models.vocab):
                after = int(models.after(states[accepted], torch.tensor(token)))
                tail = joint_dist(models, LENGTH - accepted - 1, after)
                mass = chances[accepted] * following[accepted, i, token]
                dist[(*tokens[:accepted], token)] += mass * tail
    return dist, survival


@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_and_branch_sum_to_the_joint_distribution(kind: str) -> None:
    """i drafts survive as often as the paper says, for any k >= i: E[c_i]."""
    models = make_models(kind)
    for k in range(1, LENGTH):
        dist, survival = step_dist(models, kind == "certain", k)
        assert np.abs(dist - joint_dist(models, LENGTH)).max() < 3e-6, f"k = {k}"
        assert np.abs(survival - survival_chances(models, "block")[1 : k + 1]).max() < 3e-6
        gains = survival - survival_chances(models, "rejection")[1 : k + 1]
        assert (gains > -3e-6).all()
        assert gains[-1] > 0.01 or k == 1 or kind not in ("dense", "shaped")


def run_of_coins(num_drafts: Tensor, passes: Tensor, drafts: block.DraftPositions) -> Tensor:
    """Broken: accept up to the first coin that fails."""
    grid = torch.zeros(len(num_drafts), int(num_drafts.max()), dtype=torch.bool)
    grid[drafts.row, drafts.depth] = passes
    return grid.cumprod(dim=1).bool()[drafts.row, drafts.depth]


def first_failure(
    weights: Tensor, q: Tensor, c: Tensor, m: Tensor, k: Tensor, *rest: object
) -> Tensor:
    """Broken: accepted drafts must be an unbroken run of coins."""
    return run_of_coins(k, COINS(weights, q, c, m, k, *rest), rest[-1])  # type: ignore[arg-type]


def joint_ratio_coins(
    weights: Tensor, q: Tensor, c: Tensor, m: Tensor, k: Tensor, *rest: object
) -> Tensor:
    """Broken: every coin has the chance c_i of the last one."""
    return COINS(weights, q, c, torch.full_like(m, torch.nan), k, *rest)  # type: ignore[arg-type]


def token_residual(p: Tensor, *rest: object) -> Tensor:
    """Broken: the replacement's distribution is max(0, p - q), without the joint ratio."""
    return RESIDUAL(p / p.sum(dim=1, keepdim=True), *rest)  # type: ignore[arg-type]


COINS, RESIDUAL = block.accepting_coins, verify.residual_of


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_ends_where_no_token_may_follow(depth: int) -> None:
    """The distribution after `depth` drafts is NaN. Drafts up to there survive as often as
    otherwise, E[c], and none after."""
    models = make_models("dense")
    blocks = Blocks.of(models, list(itertools.product(range(VOCAB), repeat=DEEPEST)))
    blocks.p.view(-1, DEEPEST + 1, VOCAB)[:, depth:] = torch.nan
    draft, survival = exact_dists(models.draft), np.zeros(DEEPEST)
    for tokens, states, coins in zip(*blocks[:2], coin_chances(blocks, False), strict=True):
        drawn = np.prod([draft[int(s), x] for s, x in zip(states, tokens, strict=False)])
        survival += drawn * np.cumsum(accepted_dist(coins)[::-1])[::-1][1:]
    assert np.abs(survival[:depth] - survival_chances(models, "block")[1 : depth + 1]).max() < 3e-6
    assert not survival[depth:].any()


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (block, "accepting_coins", first_failure),
        (block, "accepting_coins", joint_ratio_coins),
        (verify, "residual_of", token_residual),
    ],
)
def test_broken_rules_are_caught(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, broken: object
) -> None:
    """Right distributions are right to 3e-6."""
    models = make_models("dense")
    monkeypatch.setattr(module, name, broken)
    assert np.abs(step_dist(models, False, DEEPEST)[0] - joint_dist(models, LENGTH)).max() > 3e-4


def test_the_example_of_the_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 are accepted, by token only 10/9."""
    dists = torch.tensor([[1 / 3, 2 / 3], [2 / 3, 1 / 3]])
    models = ToyModels(dists[:1].repeat(2, 1), dists[1:].repeat(2, 1))
    blocks = Blocks.of(models, list(itertools.product(range(2), repeat=2)))
    total = 0.0
    for drafts, coins in zip(blocks.drafts, coin_chances(blocks, False), strict=True):
        drawn = np.prod([(2 / 3, 1 / 3)[x] for x in drafts])
        total += drawn * float(accepted_dist(coins) @ np.arange(3))
    assert total == pytest.approx(11 / 9, abs=1e-6)
    assert survival_chances(models, "rejection", 2)[1:].sum() == pytest.approx(10 / 9, abs=1e-6)


# --- two steps, exactly ---------------------------------------------------------------------------

ONE, TOKENS = Fraction(1), range(3)
P, Q = ([Fraction(x, 10) for x in dist] for dist in ((5, 4, 1), (2, 5, 3)))
PAIRS = list(itertools.product(TOKENS, repeat=2))


def judged(drafts: tuple[int, int]) -> tuple[list[Fraction], list[Fraction]]:
    """Return c_0, c_1, c_2 and the chances of both coins; p and q do not depend on the context."""
    c = [ONE]
    for x in drafts:
        c.append(min(ONE, c[-1] * P[x] / Q[x]))
    mass = sum(max(c[1] * p - q, Fraction(0)) for p, q in zip(P, Q, strict=True))
    return c, [ONE if c[1] == 1 else mass / (mass + 1 - c[1]), c[2]]


def residual(c: Fraction) -> list[Fraction]:
    weights = [max(c * p - q, Fraction(0)) for p, q in zip(P, Q, strict=True)]
    return [w / sum(weights) for w in weights] if sum(weights) else list(P)


def outcomes(
    drafts: tuple[int, int], coins: list[Fraction]
) -> Iterator[tuple[int, tuple[int, ...], Fraction]]:
    """Yield the number of accepted drafts, the emitted tokens, and their chance."""
    c, _ = judged(drafts)
    stops = [(1 - coins[0]) * (1 - coins[1]), coins[0] * (1 - coins[1]), coins[1]]
    for accepted, chance in enumerate(stops):
        following = list(P) if accepted == 2 else residual(c[accepted])
        for y in TOKENS:
            yield accepted, (*drafts[:accepted], y), chance * following[y]


def two_steps(*, drafts_again: bool, coins_again: bool) -> dict[tuple[int, int], Fraction]:
    """Return the distribution of the first two tokens. After a step that accepts nothing the next
    one begins at the position of the second draft.

    With `drafts_again` it drafts that token again. With `coins_again` its first coin is the one
    that has just failed there, so uniform above the chance that it failed.
    """
    dist = dict.fromkeys(PAIRS, 0 * ONE)
    for first in PAIRS:
        h = judged(first)[1]
        for accepted, emitted, chance in outcomes(first, h):
            mass = Q[first[0]] * Q[first[1]] * chance
            if accepted:
                dist[emitted[0], emitted[1]] += mass
                continue
            for second in PAIRS:
                drawn = Q[second[0]] * Q[second[1]]
                if drafts_again:
                    drawn = Q[second[1]] * (second[0] == first[1])
                coins = judged(second)[1]
                if coins_again:
                    above = max(Fraction(0), coins[0] - h[1]) / (1 - h[1]) if h[1] < 1 else ONE
                    coins = [above, coins[1]]
                for _, after, following in outcomes(second, coins):
                    dist[emitted[0], after[0]] += mass * drawn * following
    return dist


def test_two_steps_with_noise_of_their_own_have_the_distribution_to_the_fraction() -> None:
    dist = two_steps(drafts_again=False, coins_again=False)
    assert dist == {(a, b): P[a] * P[b] for a, b in dist}


@pytest.mark.parametrize(
    ("drafts_again", "coins_again"), [(True, False), (False, True), (True, True)]
)
def test_two_steps_that_share_noise_have_not(drafts_again: bool, coins_again: bool) -> None:
    """Neither drafts nor coins may be used again: one coin for a block is not enough."""
    dist = two_steps(drafts_again=drafts_again, coins_again=coins_again)
    assert sum(dist.values()) == 1
    assert max(abs(dist[a, b] - P[a] * P[b]) for a, b in dist) > Fraction(1, 1000)


# --- two steps, with the real noise ---------------------------------------------------------------

MANY = 200_000


@functools.cache
def shaped_models() -> ShapedModels:
    return ShapedModels()


def z_of_steps(*, drafts_again: bool = False, coins_again: bool = False) -> float:
    decoder = Decoder(shaped_models(), "block", Fixed(DEEPEST))
    if drafts_again:
        decoder.mode = decoder.mode._replace(depth_step=0)
    with pytest.MonkeyPatch.context() as patch:
        if coins_again:
            patch.setattr(noise, "DEPTH_STEP", 0)
        return joint_z(decoder.run(MANY, 3).tokens, shaped_models())


def test_noise_of_a_depth_keeps_the_joint_distribution_over_steps() -> None:
    assert abs(z_of_steps()) < Z_BOUND


@pytest.mark.parametrize(
    "again", [("drafts_again",), ("coins_again",), ("drafts_again", "coins_again")]
)
def test_noise_by_position_alone_is_caught(again: tuple[str, ...]) -> None:
    assert z_of_steps(**dict.fromkeys(again, True)) > CAUGHT
