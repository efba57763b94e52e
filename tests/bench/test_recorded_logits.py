"""Recorded logits: peaked like a model's, in any vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gpu.recorded_logits import ROWS, VOCAB, load, profiles, recorded_logits


def nuclei(logits: Tensor) -> Tensor:
    """Return the tokens that temperature 0.8 and top_p 0.9 keep, for each row, ascending."""
    probs = (logits.double() / 0.8).softmax(-1).sort(-1, descending=True).values
    return ((probs.cumsum(-1) < 0.9).sum(-1) + 1).sort().values


def test_nuclei_are_those_of_the_recorded_model() -> None:
    sizes = nuclei(torch.from_numpy(profiles(VOCAB)))
    assert sizes[[0, ROWS // 2, -1]].tolist() == pytest.approx([1, 10, 874], rel=0.2)
    assert nuclei(torch.randn(4, VOCAB) * 2)[0] > 2000, "random logits are nearly flat"


@pytest.mark.parametrize("vocab", [32_000, 128_256, 262_144])
def test_a_vocabulary_keeps_the_head_and_stretches_the_tail(vocab: int) -> None:
    stretched, recorded = profiles(vocab), profiles(VOCAB)
    assert stretched.shape == (ROWS, vocab) and (np.diff(stretched) <= 0).all()
    assert np.array_equal(stretched[:, :1024], recorded[:, :1024])
    assert np.allclose(stretched[:, -1], recorded[:, -1])
    assert np.array_equal(stretched[:, 0], load().logits[:, 0])


def test_rows_are_permutations_of_profiles() -> None:
    logits = recorded_logits(ROWS + 2, 4096, dtype=torch.float32, seed=3)
    expected = torch.from_numpy(profiles(4096))
    assert torch.equal(logits[:ROWS].sort(descending=True).values, expected)
    assert torch.equal(logits[ROWS:].sort(descending=True).values, expected[:2])
    assert not torch.equal(logits[0], logits[ROWS]), "each row has its own order"
    assert torch.equal(logits, recorded_logits(ROWS + 2, 4096, dtype=torch.float32, seed=3))
    assert recorded_logits(1, 4096).dtype == torch.bfloat16


def test_what_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^vocab: 2047 tokens, at least 2048"):
        recorded_logits(1, 2047)
