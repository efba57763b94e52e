"""The first commands of a GPU's owner, on a simulated GPU; and commands that it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from cbatch import LLM, SamplingParams
from cbatch.runtime import compiled
from cbatch.runtime.gpu.decoder import ProductBuilder
from tests.gpu_proofs.pretence.gpu import Cuda, pretending, use_references
from tests.gpu_proofs.pretence.tensors import CUDA, MixedDevices
from tests.runtime.engines import tiny_config

PROMPTS = [list(range(5, 25)), [7, 9, 11], list(range(40, 49))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=0.8, seed=3, top_k=9, max_tokens=5, verification="coupled"),
    SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, frequency_penalty=0.5),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    with pretending() as cuda:
        use_references(cuda, monkeypatch)
        yield cuda


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write configurations only: weights are drawn by their names."""
    c = tiny_config()
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": 16,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    folders = []
    for name, layers in (("target", 2), ("draft", 1)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": layers}))
        folders.append(folder)
    return folders[0], folders[1]


def load(pair: tuple[Path, Path | None], **more: Any) -> LLM:
    return LLM(*pair, random_weights_seed=4, max_num_seqs=2, tokenizer="none", **more)


def tokens(llm: LLM) -> list[list[int]]:
    completions = llm.generate(PROMPTS, PARAMS)
    assert [each.error for each in completions] == [None] * len(completions)
    return [[*each.choices[0].token_ids] for each in completions]


def compiles(dtype: torch.dtype) -> bool:
    raise AssertionError("kernels for a CPU, on a GPU")


def test_a_gpu_serves_by_default(
    cuda: Cuda, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "compiles", compiles)
        llm = load(pair)
    assert llm.info.device == "cuda" and llm.info.lookahead.startswith("adaptive")
    captured = cuda.only.seen["captured"]
    on_gpu = tokens(llm)
    assert on_gpu == tokens(load(pair, device="cpu"))
    assert cuda.only.seen["captured"] == captured > 10 < cuda.only.seen["replayed"]


def test_tests_of_a_model_run_on_its_own_device(cuda: Cuda, pair: tuple[Path, Path]) -> None:
    """They run outside of steps. Every launch on whatever device is current is an error here."""
    assert load(pair, device="cuda", numerics="invariant").info.device == "cuda"
    assert not cuda.guards


def on_the_host(builder: ProductBuilder, name: str) -> torch.Tensor:
    """Broken: norms stay on the host, where they were read."""
    return builder._get(name, builder.config.hidden_size).cpu().float()


def test_a_weight_that_is_left_on_the_host_is_caught(
    cuda: Cuda, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProductBuilder, "_norm", on_the_host)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        load((pair[0], None))


@triton.jit
def copying(source, target):
    tl.store(target, tl.load(source))


def test_a_tensor_knows_its_side(cuda: Cuda) -> None:
    host, there = torch.ones(3), torch.ones(3, device="cuda")
    assert host.device.type == "cpu" and there.device == CUDA and there[1:].is_cuda
    assert (there * 2 + there.sum()).to("cpu").tolist() == [5.0] * 3
    assert host.to(there.device).device == CUDA and host.device.type == "cpu"
    assert host.copy_(there) is host and host.device.type == "cpu"
    with pytest.raises(MixedDevices):
        there + host
    with pytest.raises(MixedDevices):
        torch.rand(3, device="cuda", generator=torch.Generator("cpu"))
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with torch.cuda.device(CUDA):
        copying[(1,)](there, there[1:])
        with pytest.raises(ValueError, match="cannot be accessed"):
            copying[(1,)](host, there)
