"""Checkpoints of safetensors: shards, what is wrong is named, and tensors that nothing reads. Our
code and transformers' agree."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch import LLM, SamplingParams
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.model.checkpoint import (
    RandomWeights,
    Safetensors,
    open_checkpoint,
    resolve_directory,
    resolve_dtype,
)
from cbatch.runtime.model.config import ModelError
from tests.runtime.hf_models import SHAPE, build


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


# --- more or fewer tensors than config.json implies -----------------------------------------------

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
