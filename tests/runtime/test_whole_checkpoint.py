"""Checkpoints with more or fewer tensors than their config.json implies: our code and transformers'
agree."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch import LLM, SamplingParams
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.weight_files import Safetensors
from tests.runtime.hf_models import SHAPE, build

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IMPLS = pytest.mark.parametrize("impl", ["own", "transformers"])


def change(path: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    """Add tensors to a checkpoint."""
    every = load_file(path / "model.safetensors") | tensors
    if shards == 1:
        save_file(every, path / "model.safetensors", metadata={"format": "pt"})
        return
    (path / "model.safetensors").unlink()
    files = {name: f"model-{at % shards}.safetensors" for at, name in enumerate(sorted(every))}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in every.items() if files[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def configure(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def prompt_logprobs(path: Path, impl: str) -> list[float]:
    llm = LLM(path, model_impl=impl, tokenizer="none", num_blocks=32, lookahead="off")
    done = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    return [round(each.logprob or 0.0, 3) for each in (done.prompt_logprobs or ())[1:] if each]


@pytest.mark.parametrize(("family", "shards"), [("llama", 3), ("qwen3", 1)])
def test_a_head_in_addition_to_a_tied_embedding(
    tmp_path: Path, family: str, shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    tied, other = tmp_path / "tied", tmp_path / "other"
    for path in (tied, other):
        build(path, family, tie_word_embeddings=True)
    change(tied, {HEAD: load_file(tied / "model.safetensors")[EMBEDDING].clone()}, shards=shards)
    head = torch.randn(SHAPE["vocab_size"], SHAPE["hidden_size"])
    change(other, {HEAD: head}, shards=shards)
    said = {
        path: [prompt_logprobs(path, impl) for impl in ("own", "transformers")]
        for path in (tied, other)
    }
    for own, other_code in said.values():
        assert own == pytest.approx(other_code, abs=2e-3)
    assert said[tied][0] != said[other][0]
    messages = [record.getMessage() for record in caplog.records]
    warnings = [m for m in messages if "tie_word_embeddings" in m]
    assert len(warnings) == 2 and all(str(other) in m and HEAD in m for m in warnings)
    assert not any("are not used" in m for m in messages)
    configure(other, tie_word_embeddings=False)
    assert prompt_logprobs(other, "own") == said[other][0]


@IMPLS
def test_tensors_that_nothing_reads_are_reported(
    tmp_path: Path, impl: str, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path, "llama", num_hidden_layers=8, tie_word_embeddings=False)
    prompt_logprobs(tmp_path, impl)
    assert not any("are not used" in record.getMessage() for record in caplog.records)
    configure(tmp_path, num_hidden_layers=2)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    change(tmp_path, bias | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    prompt_logprobs(tmp_path, impl)
    (message,) = [m for r in caplog.records if "are not used" in (m := r.getMessage())]
    assert f"{tmp_path}: 55 tensors" in message and "model.layers.7." not in message
    assert "model.layers.0.* (1), model.layers.2.* (9)" in message and message.endswith(
        " and 3 more"
    )
    assert len(message) < 300 + len(str(tmp_path))


@IMPLS
@pytest.mark.parametrize(
    "values", [{"num_hidden_layers": 4}, {"tie_word_embeddings": False}], ids=["layer", "head"]
)
def test_tensors_that_are_missing_are_named(tmp_path: Path, impl: str, values: Any) -> None:
    """transformers would draw them at random."""
    build(tmp_path, "llama", tie_word_embeddings=True)
    configure(tmp_path, **values)
    missing = HEAD if "tie_word_embeddings" in values else r"model\.layers\.3\.[a-z_.]*"
    with pytest.raises(ModelError, match=f"tensor {missing} is missing"):
        prompt_logprobs(tmp_path, impl)


@pytest.mark.parametrize(
    ("impl", "field", "kind"),
    [
        ("auto", "rope_scaling", "mrope"),
        ("transformers", "rope_parameters", "mrope"),
        ("auto", "rope_parameters", 5),
        ("transformers", "rope_scaling", ["linear"]),
    ],
)
def test_an_unknown_type_of_rope_is_named(tmp_path: Path, impl: str, field: str, kind: Any) -> None:
    build(tmp_path, "llama")
    configure(tmp_path, **{"rope_parameters": None, field: {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(ModelError) as caught:
        prompt_logprobs(tmp_path, impl)
    words = [
        str(tmp_path / "config.json"),
        f"{field}.rope_type: {kind!r} is not",
        "supported: default",
    ]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_weights_is_named(tmp_path: Path, name: str) -> None:
    build(tmp_path, "llama")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name}: is a folder, a pipe or a device"):
        Safetensors(tmp_path)
