"""T1, T2, T3, T5: distributions of emitted and accepted tokens, with the real noise, in all modes.

The false-alarm rate of a bound |z| < 5 is 6 in 10 million; seeds are fixed. `chain` models have
plain distributions, `shaped` ones penalties, bias, bans, min_tokens and every filter, with the
draft prefix.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from cbatch.runtime.sampling.rejection_sampler import NoiseRows
from tests.chi_square import chi_square_z
from tests.triton_kernels.decoding import (
    DEEPEST,
    MODES,
    Z_BOUND,
    Decoded,
    Decoder,
    Fixed,
    acceptance_z,
    joint_z,
    survival_chances,
)
from tests.triton_kernels.toy_models import (
    ShapedModels,
    ToyModels,
    chain_models,
    exact_dists,
    joint_dist,
)

COUNT = 40_000
ALL = pytest.mark.parametrize("mode", list(MODES))
KINDS_OF_MODELS = pytest.mark.parametrize("kind", ["chain", "shaped"])


@functools.cache
def models_of(kind: str) -> ToyModels:
    return chain_models() if kind == "chain" else ShapedModels()


@functools.cache
def decoded(kind: str, mode: str) -> Decoded:
    """Return three tokens of `COUNT` sequences; sequence i always drafts i % 4."""
    return Decoder(models_of(kind), mode).run(COUNT, 3)


# --- T1: one position, many tokens ----------------------------------------------------------------


def single_position_check(mode: str, count: int) -> tuple[float, float, float]:
    """Return z of the first token over 32 cells, and TV over its mean by chance alone. Return z of
    the same sample against a distribution that is 2 % away, too."""
    models = chain_models(vocab=32, seed=2)
    tokens = Decoder(models, mode).run(count, 1).tokens[:, 0]
    counts = np.bincount(tokens, minlength=32)
    dist = joint_dist(models, 1)
    chance = 0.5 * np.sqrt(2 / (math.pi * count)) * np.sqrt(dist * (1 - dist)).sum()
    far = dist.copy()
    far[dist.argmax()] -= 0.02
    far += 0.02 / 32
    distance = 0.5 * np.abs(counts / count - dist).sum()
    return chi_square_z(counts, dist), distance / chance, chi_square_z(counts, far)


@ALL
def test_t1_one_token_of_32(mode: str) -> None:
    z, distance, z_of_a_wrong_dist = single_position_check(mode, 50_000)
    assert abs(z) < Z_BOUND and distance < 3
    assert z_of_a_wrong_dist > 2 * Z_BOUND


@pytest.mark.statistics
@ALL
def test_t1_one_token_of_32_in_a_million(mode: str) -> None:
    z, distance, _ = single_position_check(mode, 1_000_000)
    assert abs(z) < Z_BOUND and distance < 3


# --- T2: sequences --------------------------------------------------------------------------------


@ALL
@KINDS_OF_MODELS
def test_t2_joint_distribution_of_three_tokens(kind: str, mode: str) -> None:
    """The distribution is right for each k, and for the whole ragged batch."""
    models, run = models_of(kind), decoded(kind, mode)
    assert abs(joint_z(run.tokens, models)) < Z_BOUND
    for k in range(DEEPEST + 1):
        assert abs(joint_z(run.tokens[k :: DEEPEST + 1], models)) < Z_BOUND, f"k = {k}"
    accepted, drafted = run.steps[0].verdict.num_accepted, run.steps[0].num_drafts
    for ended in (accepted < drafted, (accepted == drafted) & (drafted >= 2), drafted == 0):
        assert float(ended.float().mean()) > 0.04


@ALL
def test_t2_a_distribution_that_is_not_the_models_is_noticed(mode: str) -> None:
    """Power of the test above: the draft's distribution, and a distribution with 3 % of one token
    moved, are noticed."""
    models, tokens = models_of("chain"), decoded("chain", mode).tokens
    moved = models.target.clone()
    moved[:, 0] += 0.03
    assert joint_z(tokens, ToyModels(moved, moved)) > 2 * Z_BOUND
    assert joint_z(tokens, ToyModels(models.draft, models.draft)) > 10 * Z_BOUND


@ALL
@KINDS_OF_MODELS
def test_t2_tokens_do_not_depend_on_the_batch(kind: str, mode: str) -> None:
    """Tokens are the same with rows shuffled in every step, and with half of the sequences
    alone."""
    count = 2000
    tokens = decoded(kind, mode).tokens[:count]
    models = models_of(kind)
    shuffled = Decoder(models, mode, shuffle=True).run(count, 3)
    assert shuffled.steps[0].at.tolist() != list(range(count))
    assert np.array_equal(shuffled.tokens, tokens)
    half = Decoder(models, mode).run(count // 2, 3).tokens
    assert np.array_equal(half, tokens[: count // 2])


class _KeyedByRow(Decoder):
    """Broken: noise by place in the batch."""

    def noise_rows(self, at: torch.Tensor, positions: torch.Tensor) -> NoiseRows:
        return super().noise_rows(torch.arange(len(at)), positions)


@ALL
def test_noise_keyed_by_batch_row_is_caught(mode: str) -> None:
    """The check above must fail for this broken variant, though each token's distribution is
    right."""
    run = _KeyedByRow(models_of("chain"), mode, shuffle=True).run(2000, 3)
    assert not np.array_equal(run.tokens, decoded("chain", mode).tokens[:2000])
    assert abs(joint_z(run.tokens[:, :1], models_of("chain"))) < Z_BOUND


@KINDS_OF_MODELS
def test_coupled_tokens_do_not_depend_on_k(kind: str) -> None:
    """Tokens are the same without drafts, with every fixed k and with ragged k; acceptance and
    rejection occur."""
    models, count = models_of(kind), 4000
    plain = Decoder(models, "coupled", Fixed(0)).run(count, 3).tokens
    assert np.array_equal(plain, decoded(kind, "coupled").tokens[:count])
    for k in range(1, DEEPEST + 1):
        run = Decoder(models, "coupled", Fixed(k)).run(count, 3)
        assert np.array_equal(run.tokens, plain)
        accepted = run.steps[0].verdict.num_accepted
        assert 0 < int((accepted == k).sum()) < count
    rejected = Decoder(models, "rejection", Fixed(2)).run(count, 3).tokens
    assert not np.array_equal(rejected, Decoder(models, "rejection", Fixed(0)).run(count, 3).tokens)


# --- T3: acceptance -------------------------------------------------------------------------------


@ALL
@KINDS_OF_MODELS
def test_t3_acceptance_distribution(kind: str, mode: str) -> None:
    """Accepted drafts at each depth are binomial with the exact chance, and so is their
    histogram."""
    run, models = decoded(kind, mode), models_of(kind)
    chances = survival_chances(models, mode)
    assert max(abs(z) for z in acceptance_z(run, chances)) < Z_BOUND
    deepest = run.steps[0].num_drafts == DEEPEST
    counts = torch.bincount(run.steps[0].verdict.num_accepted[deepest], minlength=DEEPEST + 1)
    histogram = np.append(chances[:-1] - chances[1:], chances[-1])
    assert abs(chi_square_z(counts.numpy(), histogram)) < Z_BOUND


def test_t3_notices_the_other_modes_acceptance() -> None:
    """Five points of acceptance apart, in the shaped models, are noticed in a fifth of the
    sample."""
    models = models_of("shaped")
    other = survival_chances(models, "coupled")
    deep = Decoder(models, "rejection", Fixed(DEEPEST)).run(COUNT // 5, 1)
    assert max(abs(z) for z in acceptance_z(deep, other)) > Z_BOUND


def test_coupled_acceptance_against_theory() -> None:
    """Daliri, Musco, Suresh 2024: (1 - TV) / (1 + TV) <= Pr[match] <= 1 - TV, over pairs of
    distributions from nearly equal to nearly disjoint. The measured chance is the exact one."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(24, 12)) * 2
    spread = np.geomspace(0.05, 4, 24)[:, None]
    dists = [
        torch.from_numpy(x).softmax(-1).float()
        for x in (logits, logits + spread * rng.normal(size=logits.shape))
    ]
    p, q = exact_dists(dists[0]), exact_dists(dists[1])
    overlap = np.minimum(p, q).sum(axis=1)
    match = MODES["coupled"].overlap(p, q).sum(axis=1)
    bound = overlap / (2 - overlap)
    assert (bound <= match + 1e-12).all() and (match <= overlap + 1e-12).all()
    assert overlap.min() < 0.3 and overlap.max() > 0.97
    count = 8_000
    for i in range(0, 24, 4):
        pair = ToyModels(*(dist[i : i + 1].repeat(12, 1) for dist in dists))
        step = Decoder(pair, "coupled", Fixed(1)).run(count, 1).steps[0]
        z = (float(step.verdict.num_accepted.sum()) - count * match[i]) / math.sqrt(
            count * match[i] * (1 - match[i])
        )
        assert abs(z) < Z_BOUND
        own = Decoder(pair, "coupled", Fixed(0)).run(count, 1).tokens[:, 0]
        assert np.array_equal(
            own == step.drafts[:, 0].numpy(), step.verdict.num_accepted.numpy() == 1
        )


# --- T5: the p-values themselves ------------------------------------------------------------------

GROUPS, GROUP = 200, 300
KS_BOUND = 1.95  # sqrt(n) * D of Kolmogorov and Smirnov: larger by chance in 1 of 1000


def ks_of_groups(tokens: np.ndarray, models: ToyModels) -> float:
    """Return sqrt(n) * D of the p-values of `GROUPS` groups of sequences against uniform."""
    z = np.array([joint_z(group, models) for group in tokens.reshape(GROUPS, GROUP, -1)])
    p = np.sort([0.5 * math.erfc(value / math.sqrt(2)) for value in z])
    steps = np.arange(GROUPS + 1) / GROUPS
    return float(np.sqrt(GROUPS) * max((steps[1:] - p).max(), (p - steps[:-1]).max()))


@ALL
def test_t5_p_values_are_uniform(mode: str) -> None:
    """Their spread is neither too wide nor too narrow."""
    models = models_of("chain")
    tokens = Decoder(models, mode).run(GROUPS * GROUP, 2, seed=3).tokens
    assert ks_of_groups(tokens, models) < KS_BOUND


class _FewKeys(Decoder):
    """Broken: noise that is used again."""

    def noise_rows(self, at: torch.Tensor, positions: torch.Tensor) -> NoiseRows:
        return super().noise_rows(at % GROUP, positions)


def test_t5_random_numbers_used_again_are_caught() -> None:
    models = models_of("chain")
    tokens = _FewKeys(models, "rejection").run(GROUPS * GROUP, 2, seed=3).tokens
    assert ks_of_groups(tokens, models) > 2 * KS_BOUND
