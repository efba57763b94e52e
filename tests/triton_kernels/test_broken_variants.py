"""Subtly wrong variants of speculation, each caught by the joint distribution of three tokens.

Caught means z > 10 for a sample whose right version stays within 5 (each by chance in fewer than 6
of 10 million; seeds are fixed). Where coupled mode cannot be wrong, because no draft probability
enters, its tokens are shown to be unchanged.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as verify
from cbatch.runtime.sampling.rejection_sampler import NoiseRows, rejection_verify
from tests.triton_kernels.decoding import (
    DEEPEST,
    MODES,
    Z_BOUND,
    Decoder,
    Fixed,
    Policy,
    Step,
    joint_z,
)
from tests.triton_kernels.toy_models import ShapedModels, ToyModels, chain_models

COUNT = 15_000
CAUGHT = 2 * Z_BOUND
DEEP = Fixed(DEEPEST)
ALL = pytest.mark.parametrize("mode", list(MODES))


@functools.cache
def models_of(kind: str) -> ToyModels:
    return chain_models() if kind == "chain" else ShapedModels()


@functools.cache
def right_tokens(kind: str, mode: str) -> np.ndarray:
    tokens = Decoder(models_of(kind), mode, DEEP).run(COUNT, 3).tokens
    assert abs(joint_z(tokens, models_of(kind))) < Z_BOUND
    return tokens


# --- what the decoder does with verdict, context and probabilities -------------------------------


class _KeepsRejected(Decoder):
    """Known flaw A1: history ends in the rejected draft; the replacement never enters it."""

    def resume(self, step: Step) -> Tensor:
        accepted = step.verdict.num_accepted[:, None]
        kept = step.states[:, 1:].gather(1, accepted.clamp(max=step.drafts.shape[1] - 1)).squeeze(1)
        return torch.where(accepted.squeeze(1) < step.num_drafts, kept, super().resume(step))


@ALL
def test_rollback_that_keeps_the_rejected_token_is_caught(mode: str) -> None:
    """Known flaw A1."""
    models = models_of("chain")
    right_tokens("chain", mode)
    assert joint_z(_KeepsRejected(models, mode, DEEP).run(COUNT, 3).tokens, models) > CAUGHT


class _StalePenalties(Decoder):
    """Broken: penalties, min_tokens and bans see the prefix as it was before the drafts."""

    def target_rows(self, states: Tensor, used: Tensor) -> Tensor:
        history = states[:, :1].expand_as(states)[used]
        return self.models.dists(self.models.target_logits, states[used], history)


@ALL
def test_penalties_without_the_draft_prefix_are_caught(mode: str) -> None:
    models = models_of("shaped")
    right_tokens("shaped", mode)
    assert joint_z(_StalePenalties(models, mode, DEEP).run(COUNT, 3).tokens, models) > CAUGHT


class _UnfilteredQ(Decoder):
    """Broken: drafts come from the filtered distribution; the distribution reported is the one
    before the filters."""

    def reported(self, states: Tensor) -> Tensor:
        return self.models.unfiltered_draft[states]


@ALL
def test_unfiltered_q_is_caught(mode: str) -> None:
    """Known flaw A2, and a bug that another library shipped (q before top-k and top-p)."""
    models = models_of("shaped")
    tokens = _UnfilteredQ(models, mode, DEEP).run(COUNT, 3).tokens
    if mode != "coupled":
        assert joint_z(tokens, models) > CAUGHT
    else:
        assert np.array_equal(tokens, right_tokens("shaped", mode))


class _ColderQ(Decoder):
    def reported(self, states: Tensor) -> Tensor:
        return self.models.draft[states].sqrt()


def test_wrong_q_is_caught() -> None:
    """q must be what the draft was drawn from, not the same logits at another temperature."""
    tokens = _ColderQ(models_of("chain"), "rejection", DEEP).run(COUNT, 3).tokens
    assert joint_z(tokens, models_of("chain")) > CAUGHT


class _Certain(Decoder):
    """Broken: drafts are reported as chosen with certainty, though they were drawn from q."""

    def reported(self, states: Tensor) -> None:
        return None


def test_drafts_declared_certain_keep_the_distribution_and_accept_less() -> None:
    """Given the draft, a one-hot q is a true statement, however the draft was drawn."""
    models = models_of("chain")
    accepted = []
    for decoder in (_Certain(models, "rejection", DEEP), Decoder(models, "rejection", DEEP)):
        run = decoder.run(COUNT, 3)
        assert abs(joint_z(run.tokens, models)) < Z_BOUND
        first = run.steps[0]
        accepted.append(
            float((first.verdict.num_accepted > 0)[first.num_drafts > 0].float().mean())
        )
    assert accepted[0] < accepted[1] - 0.05


class _DropsUnlikely(Policy):
    """Broken: it verifies no draft from the first one that the draft model itself found
    unlikely."""

    def choose(self, at: Tensor) -> Tensor:
        return torch.full_like(at, DEEPEST)

    def trim(self, k: Tensor, drafts: Tensor, draft_probs: Tensor) -> Tensor:
        likely = (draft_probs >= 0.3).to(torch.int64).cumprod(dim=1).sum(dim=1)
        return torch.minimum(k, likely)


@ALL
def test_dropping_drafts_by_their_own_low_probability_is_caught(mode: str) -> None:
    """p = (.7, .3), q = (.6, .4), drop if q(x) < .5: the output would be (.88, .12)."""
    models = models_of("chain")
    run = Decoder(models, mode, _DropsUnlikely()).run(COUNT, 3)
    kept = run.steps[0].num_drafts
    assert 0.1 < float((kept == 0).float().mean()) < 0.9 and bool((kept == 2).any())
    if mode != "coupled":
        assert joint_z(run.tokens, models) > CAUGHT
    else:
        assert np.array_equal(run.tokens, right_tokens("chain", mode))


# --- inside the verification ----------------------------------------------------------------------


def test_residual_drawn_with_the_accept_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement must not use the noise again that rejected the draft."""
    monkeypatch.setattr(noise, "RESIDUAL", noise.ACCEPT)
    models = models_of("chain")
    assert joint_z(Decoder(models, "rejection", DEEP).run(3 * COUNT, 3).tokens, models) > CAUGHT


def test_replacement_drawn_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right distribution is norm(max(0, p - q))."""
    monkeypatch.setattr(verify, "residual_of", lambda p, q, rejected: p)
    models = models_of("chain")
    assert joint_z(Decoder(models, "rejection", DEEP).run(COUNT, 3).tokens, models) > CAUGHT


def test_a_coupled_draft_with_noise_of_its_own_is_caught() -> None:
    """The distribution is right, but the point of coupling is lost: acceptance falls below the
    guarantee."""
    models = models_of("chain")
    shared = Decoder(models, "coupled", DEEP).run(COUNT, 3)
    apart = Decoder(models, "coupled", DEEP)
    apart.mode = apart.mode._replace(draft_purpose=noise.DRAFT)
    run = apart.run(COUNT, 3)
    assert np.array_equal(run.tokens, shared.tokens)
    hits = [float((x.steps[0].verdict.num_accepted > 0).float().mean()) for x in (shared, run)]
    assert hits[1] < 0.8 * hits[0]


def forbidden_tokens_accepted() -> int:
    """Count drafts with p = 0 that pass at the smallest draw, however small their q."""
    q = torch.tensor([[1e-38, 1.0], [0.5, 0.5], [1e-20, 1.0]])
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]]).repeat(3, 1)
    ones, zeros = torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    rows = NoiseRows(torch.stack((ones, ones), dim=1), zeros, zeros)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "scalar_words", lambda *_: zeros)
        verdict = rejection_verify(p, zeros, q, ones, rows)
    assert (verdict.next_tokens[verdict.num_accepted == 0] == 1).all()
    return int(verdict.num_accepted.sum())


def test_a_draft_with_p_of_zero_is_never_accepted() -> None:
    """Known flaw A3."""
    assert forbidden_tokens_accepted() == 0


def test_u_at_most_p_over_q_at_p_of_zero_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known flaw A3: u in [0, 1) and `u <= p / q`, which holds for u = 0 and p = 0."""

    def naive(p: Tensor, x: Tensor, q: Tensor, k: Tensor, *_: object) -> Tensor:
        u = noise.scalar_words(None, None, None, None).to(torch.float32) * 2.0**-32
        at = torch.arange(len(x))
        return (u <= p[2 * at, x] / q[at, x]).to(torch.int64)

    monkeypatch.setattr(verify, "count_accepted", naive)
    assert forbidden_tokens_accepted() == 3


def z_without_residual_mass() -> float:
    """Return z of the replacements of drafts that round-off rejected though p equals q."""
    zeros = torch.zeros(4000, dtype=torch.int64)
    ones = torch.ones(4000, dtype=torch.int64)
    p = torch.tensor([[0.25, 0.75]]).repeat(8000, 1)
    rows = NoiseRows(torch.stack((torch.arange(4000), ones), dim=1), zeros, zeros)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "count_accepted", lambda *_: zeros)
        tokens = rejection_verify(p, ones, p[:4000].clone(), ones, rows).next_tokens
    models = ToyModels(p[:2], p[:2])
    return joint_z(tokens.numpy()[:, None], models)


def test_a_residual_of_zero_mass_falls_back_to_p() -> None:
    """Known flaw A3."""
    assert abs(z_without_residual_mass()) < Z_BOUND


def test_a_residual_of_zero_mass_without_fallback_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "residual_of", lambda p, q, rejected: (p - q).clamp(min=0))
    assert z_without_residual_mass() > CAUGHT
