from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.model.checkpoint import (
    RandomWeights,
    Safetensors,
    open_checkpoint,
    resolve_directory,
    resolve_dtype,
)
from cbatch.runtime.model.config import ModelError
from tests.runtime.hf_models import build


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    build(tmp_path, "llama", num_hidden_layers=2, tie_word_embeddings=False)
    return tmp_path


def test_shards_hold_what_the_single_file_holds(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    shape = tuple(tensors[name].shape)
    single = Safetensors(directory).get(name, shape).clone()
    names = sorted(tensors)
    weight_map = {n: f"model-{i % 3}.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(Safetensors(directory).get(name, shape), single)
    load_model(directory, numerics="invariant")

    (directory / weight_map[name]).unlink()
    with pytest.raises(ModelError, match=f"{weight_map[name]}: named by .*index.json"):
        load_model(directory, numerics="invariant")
    outside = [f'{{"weight_map": {{"x": "{file}"}}}}' for file in ("../x", "/x", "a/x", "\\u0000")]
    for text in ('{"weights": {}}', "[" * 100_000, '{"weight_map": {"x": 5}}', *outside):
        index.write_text(text)
        with pytest.raises(ModelError, match="index.json: weight_map"):
            Safetensors(directory)


def test_a_truncated_file_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for size in (len(content) - 100, 1000, 4, 0):
        file.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors: .*download it again"):
            load_model(directory, numerics="invariant")
    file.write_bytes(b"\xff" * 200)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(directory, numerics="invariant")
    file.unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        load_model(directory, numerics="invariant")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_missing_and_misshapen_tensors_are_named(directory: Path, name: str) -> None:
    file = directory / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items()}  # the file is rewritten
    save_file({**tensors, name: torch.zeros(3, 5)}, file)
    with pytest.raises(ModelError, match=rf"{name} has shape \[3, 5\]"):
        load_model(directory, numerics="invariant")
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(ModelError, match=rf"{name} has dtype torch.int8"):
        load_model(directory, numerics="invariant")
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        load_model(directory, numerics="invariant")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e38}}, None),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_slow": 1e-320}},
            "not give finite an",
        ),
        ({"rope_theta": 1e-45}, "rope: its values do not give finite angles"),
        ({"torch_dtype": "float8"}, "torch_dtype: 'float8' is not supported; supported: float32"),
    ],
)
def test_what_only_the_runtime_cannot_serve_is_named(
    directory: Path, changes: dict[str, Any], words: str | None
) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text())
    values.pop("rope_parameters"), values.pop("dtype")
    file.write_text(json.dumps(values | changes))
    if words is None:
        open_checkpoint(directory)
        return
    with pytest.raises(ModelError, match=f"{directory}: .*{words}"):
        open_checkpoint(directory)


def test_random_weights_depend_on_name_and_seed_only() -> None:
    first = RandomWeights(3).get("model.layers.0.mlp.up_proj.weight", (8, 4))
    assert torch.equal(first, RandomWeights(3).get("model.layers.0.mlp.up_proj.weight", (8, 4)))
    assert not torch.equal(first, RandomWeights(4).get("model.layers.0.mlp.up_proj.weight", (8, 4)))
    assert not torch.equal(first, RandomWeights(3).get("model.layers.1.mlp.up_proj.weight", (8, 4)))


def test_random_weights_need_only_a_config(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    model = load_model(directory, random_weights_seed=1, numerics="invariant", dtype="bfloat16")
    assert model.dtype == torch.bfloat16


def test_dtype_auto_is_that_of_the_checkpoint() -> None:
    assert resolve_dtype("auto", "bfloat16") == torch.bfloat16
    assert resolve_dtype("auto", None) == torch.float32
    assert resolve_dtype("float32", "bfloat16") == torch.float32
    with pytest.raises(ModelError, match="dtype: 'float8' is not supported"):
        resolve_dtype("float8", None)


def test_hub_names_and_absent_directories(tmp_path: Path) -> None:
    patterns: list[list[str]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        patterns.append(allow_patterns)
        if name == "owner/gone":
            raise ConnectionError("no route to host\nmore")
        return str(tmp_path)

    assert resolve_directory("owner/model", weights=True, download=download) == tmp_path
    resolve_directory("owner/model", weights=False, download=download)
    assert "*.safetensors" in patterns[0] and "*.safetensors" not in patterns[1]
    with pytest.raises(ModelError, match=r"owner/gone: no such directory.*no route to host"):
        resolve_directory("owner/gone", weights=True, download=download)
    with pytest.raises(ModelError, match="no such directory; give a Hugging Face model directory"):
        resolve_directory(tmp_path / "absent", weights=True, download=download)


def test_unknown_numerics_are_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="numerics: must be auto, invariant or fast"):
        load_model(directory, numerics="exact")
