from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cbatch.runtime.model.config import RopeConfig
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.rope import RotaryTable, inverse_frequencies
from tests.runtime.hf_models import ROPE, build

FAR = 100_000


@pytest.mark.parametrize("rope", ROPE)
def test_cos_and_sin_are_those_of_transformers_at_far_positions(tmp_path: Path, rope: str) -> None:
    build(tmp_path, "llama", rope, num_hidden_layers=1, head_dim=64)
    config = load_config(tmp_path)
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    positions = torch.tensor([0, 1, 77, 255, 256, 4000, FAR])
    cos, sin = reference(torch.zeros(1, 1, 1), positions[None])
    table = RotaryTable(config.rope, 64, 2, 3, torch.device("cpu"))
    rotated = table.rows(positions, FAR).unflatten(1, (2, 5, 32))
    queries, keys, values = rotated.split([3, 1, 1], dim=2)
    assert (
        (values == 1).all()
        and (keys == keys[:, :1]).all()
        and (queries == queries[:, :1, :1]).all()
    )
    queries, keys = queries[:, 0, 0], keys[:, 0, 0]
    torch.testing.assert_close(keys.real, cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(keys.imag, sin[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(queries, keys / 8)


@pytest.mark.parametrize("grown_to", [256, 300, 3000])
def test_factors_are_rounded_to_the_nearest_at_every_position(grown_to: int) -> None:
    """Factors are rounded to the nearest. A library's fp32 cosine is not, and where it is not
    depends on threads."""
    rope = RopeConfig()
    table = RotaryTable(rope, 64, 2, 3, torch.device("cpu"))
    table.cos_sin(grown_to)
    factors = table.cos_sin(2000).numpy()
    angles = np.arange(2000, dtype=np.float32)[:, None] * inverse_frequencies(rope, 64).numpy()
    exact = np.vectorize(math.cos)(angles), np.vectorize(math.sin)(angles)
    assert (factors[..., 0] == exact[0].astype(np.float32)).all()
    assert (factors[..., 1] == exact[1].astype(np.float32)).all()
    assert (torch.from_numpy(angles).cos().numpy() != factors[..., 0]).any()
