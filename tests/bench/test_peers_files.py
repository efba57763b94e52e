"""A directory written from a GGUF file is the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.peers.files import write_directory
from bench.peers.gguf_writer import F32, Q8_0, Stored, convert, gguf_bytes, stored
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import RopeConfig
from cbatch.runtime.model.rope import inverse_frequencies
from tests.runtime.hf_models import build


def written(tmp_path: Path, kind: int, family: str, rope: str, **changes: Any) -> tuple[Path, Path]:
    source = tmp_path / "source"
    source.mkdir()
    build(source, family, rope)
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    file, directory = tmp_path / "model.gguf", tmp_path / "directory"
    file.write_bytes(gguf_bytes(*convert(source, kind)))
    write_directory(file, directory)
    return file, directory


@pytest.mark.parametrize(
    ("family", "rope", "changes"),
    [
        ("llama", "default", {}),
        ("llama", "linear", {}),
        ("llama", "yarn", {}),
        ("mistral", "default", {}),
        ("qwen2", "default", {}),
        ("qwen3", "yarn", {}),
    ],
)
@pytest.mark.parametrize("kind", [F32, Q8_0])
def test_config_and_weights(
    tmp_path: Path, kind: int, family: str, rope: str, changes: dict[str, Any]
) -> None:
    file, directory = written(tmp_path, kind, family, rope, **changes)
    one, other = open_checkpoint(file, "bfloat16"), open_checkpoint(directory)
    assert other.config == msgspec.structs.replace(one.config, torch_dtype="bfloat16")
    c = one.config
    shapes = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.layers.1.self_attn.q_proj.weight": (c.num_heads * c.head_dim, c.hidden_size),
        "model.layers.1.mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        "model.norm.weight": (c.hidden_size,),
    }
    for name, shape in shapes.items():
        assert torch.equal(one.weights.get(name, shape), other.weights.get(name, shape))


def test_the_scaling_of_llama_3(tmp_path: Path) -> None:
    long = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    long |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    file, directory = written(tmp_path, F32, "llama", "default", rope_parameters=long)
    one, other = open_checkpoint(file).config, open_checkpoint(directory).config
    assert one.rope.divisors and other.rope.type == "llama3" and not other.rope.divisors
    frequencies, expected = (inverse_frequencies(c.rope, c.head_dim) for c in (one, other))
    assert torch.allclose(frequencies, expected, rtol=1e-5)
    assert not torch.allclose(frequencies, inverse_frequencies(RopeConfig(theta=5e5), one.head_dim))


def test_other_factors_are_refused(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    values, tensors = convert(tmp_path)
    factors = torch.linspace(1, 7, values["llama.rope.dimension_count"] // 2)
    more: dict[str, Stored] = {"rope_freqs.weight": stored(factors)}
    file = tmp_path / "odd.gguf"
    file.write_bytes(gguf_bytes(values, tensors | more))
    with pytest.raises(
        ValueError, match=r"rope_freqs\.weight: the factors are not those of Llama 3"
    ):
        write_directory(file, tmp_path / "directory")
