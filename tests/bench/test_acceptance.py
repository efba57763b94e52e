"""Benchmarks of acceptance and of its prediction: their arithmetic, and one small run of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import acceptance, calibration
from bench.acceptance import coupled_acceptance, rejection_acceptance
from bench.calibration import errors_of
from cbatch.core.cost import CostProfile
from tests.triton_kernels.decoding import matches


def some_laws(seed: int, count: int = 40, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 laws with zeros, of which some are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator).double() * 2
    other = logits + torch.randn(count, vocab, generator=generator)
    for x in (logits, other):
        x[torch.rand(count, vocab, generator=generator) < 0.25] = -torch.inf
        x[:, 0] = 0.0
    other[:5] = logits[:5]
    return logits.softmax(-1), other.softmax(-1)


def test_acceptance_by_sorting_is_that_of_all_pairs():
    p, q = some_laws(1)
    pairs = matches(p.numpy(), q.numpy()).sum(axis=-1)
    assert coupled_acceptance(p, q).numpy() == pytest.approx(pairs, abs=1e-12)
    overlap = rejection_acceptance(p, q)
    assert (coupled_acceptance(p, q) <= overlap + 1e-12).all()
    assert (coupled_acceptance(p, q) >= overlap / (2 - overlap) - 1e-12).all()
    assert coupled_acceptance(p, q)[:5].numpy() == pytest.approx(np.ones(5))


def test_counted_foreseen_and_reported_agree():
    """Reported and foreseen are the same sums over the same positions but for a cut at the end of
    an answer; counted has coins, 300 of them or more: 5 standard errors are 0.145."""
    args = acceptance.parse(["--positions", "480", "--output-tokens", "48", "--batch", "10"])
    for row in acceptance.measure("fresh", args):
        assert row["tried"] > 300 and row["ratio"] < 1
        assert row["counted"] == pytest.approx(row["foreseen"], abs=0.145)
        if row["mode"] == "rejection":
            assert row["reported"] == pytest.approx(row["foreseen"], abs=0.01)


def coins(rng: np.random.Generator, predicted: np.ndarray, shift: float) -> np.ndarray:
    observed: np.ndarray = (rng.random(predicted.shape) < predicted + shift).astype(float)
    return observed


def test_errors_of_a_right_and_of_a_wrong_prediction():
    rng = np.random.default_rng(2)
    predicted = rng.uniform(0.2, 0.8, (4000, 3))
    predicted[::2, 2] = np.nan  # not drafted
    right = errors_of(predicted, coins(rng, np.nan_to_num(predicted), 0.0))
    assert right.error < 2 * right.by_chance < 0.025 and right.by_depth < 0.02
    low = errors_of(predicted, coins(rng, np.nan_to_num(predicted), 0.1))
    assert low.error == pytest.approx(0.1, abs=0.02) and low.by_both == pytest.approx(0.1, abs=0.02)
    # Right on average and never where it says so: bins see it, a single one does not.
    flat = errors_of(predicted, coins(rng, np.full(predicted.shape, 0.5), 0.0))
    assert flat.by_depth < 0.02 and flat.error > 0.1


def test_a_small_run_keeps_what_was_believed(monkeypatch):
    """Prices by which drafts pay at first: a busy machine may measure others."""
    cheap = CostProfile((1, 2), (0.1, 0.1))
    monkeypatch.setattr("cbatch.engine.profile.cached_profile", lambda *_: cheap)
    args = calibration.parse(["--tokens", "200", "--output-tokens", "24"])
    row = calibration.measure("fresh", "rejection", args)
    assert row["drafts"] > 50 and 0 < row["observed"] < 1 and row["error"] < 0.5
