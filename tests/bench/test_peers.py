"""The peers compute the same model as ours, and a different model is noticed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench.engine.shapes import write_random_model
from bench.engine.systems import EngineRun, System, build_transformers, make_prompts
from bench.failures import Failures
from bench.peers import __main__ as peers
from bench.peers.agree import agreement, first_gap, reference_logits
from bench.peers.figures import DECODE
from bench.peers.files import ModelFormats
from bench.peers.gguf_writer import F16, F32, write_gguf
from bench.peers.processes import Worker
from cbatch.runtime.model.gguf_file import read_gguf
from tests.runtime.hf_models import build
from tests.smollm2 import needs_smollm2

PACKAGE = {"llama.cpp": "llama_cpp", "vllm": "vllm"}
HEADS = {"q_proj": 4, "k_proj": 2}
_GATE = "blk.1.ffn_gate.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("llama-1m", tmp_path_factory.mktemp("models"), "float32")


@pytest.mark.slow
def test_all_of_them_agree_and_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--prompt-tokens", "12", "--output-tokens", "6", "--prompts", "1", "--repeats", "1")
    kinds = ("--type", "bf16", "--batch", "3", "--startup", "--limits")
    peers.main(["--model", "llama-1m", *kinds, *sizes])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    present = [peer for peer in ("llama.cpp", "vllm") if importlib.util.find_spec(PACKAGE[peer])]
    names = [*present, "transformers", "transformers continuous"]
    assert [row["system"] for row in summary["agreement"]] == names
    assert all(row["agrees"] and row["sequences"] == 4 for row in summary["agreement"])
    telling = [name for name in ("cbatch", *names) if name in ("cbatch", "llama.cpp")]
    assert [(row["figure"], row["system"]) for row in summary["results"]] == [
        *(("startup_s", name) for name in ("cbatch", *names)),
        *(("output_tokens_per_s", name) for name in ("cbatch", *names, "limits")),
        *(("decode_tokens_per_s", name) for name in (*telling, "limits")),
    ]
    assert all(row["value"] > 0 for row in summary["results"])
    rates = [row for row in summary["results"] if row["figure"] != "startup_s"]
    assert all(row["of_limit"] > 0 for row in rates)
    assert all(row["read_gb_per_s"] > 0 for row in rates if row["figure"] == DECODE)


def test_another_model_is_found_out(model: Path, tmp_path: Path) -> None:
    """Rotary pairs are in the other order, as a wrong conversion would leave them."""
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        heads = HEADS.get(name.split(".")[-2])
        if heads is not None:
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensors[name] = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    prompts = make_prompts(model, 48, 4, real=False)
    systems = [build_transformers(path, "float32") for path in (model, model, wrong)]
    right, other = agreement("x", systems, prompts, 12, reference_logits(model), Failures())
    assert right["agrees"] and right["equal"] == 4
    assert not other["agrees"] and other["equal"] < 4


def test_a_gap_is_that_of_the_first_difference() -> None:
    seen: list[list[int]] = []

    def logits(ids: list[int]) -> np.ndarray:
        seen.append(ids)
        return np.array([0.0, 1.0, 1.004, 3.0])

    assert first_gap([7, 8], [1, 2, 3], [1, 2, 3], logits) is None and not seen
    assert first_gap([7, 8], [3, 1, 0], [3, 2, 3], logits) == pytest.approx(0.004)
    assert seen == [[7, 8, 3]]
    with pytest.raises(ValueError, match="shorter"):
        first_gap([7], [1, 2], [1], logits)
    tied, apart = (
        agreement("x", [_says([3, 1]), _says([3, other])], [[7, 8]], 2, logits, Failures())[0]
        for other in (2, 0)
    )
    assert tied["agrees"] and not apart["agrees"] and apart["logit_gap"] == 1.0


def _says(ids: list[int]) -> System:
    return System("fixed", "off", lambda prompts, _: EngineRun(1.0, [ids for _ in prompts]))


def test_the_file_holds_every_weight(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(model, path, F16)
    file = read_gguf(path)
    fields = json.loads((model / "config.json").read_text())
    for name, key in (
        ("llama.block_count", "num_hidden_layers"),
        ("llama.attention.head_count_kv", "num_key_value_heads"),
        ("llama.vocab_size", "vocab_size"),
        ("llama.feed_forward_length", "intermediate_size"),
        ("llama.attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ):
        assert file.metadata[name] == pytest.approx(fields[key])
    assert file.metadata["tokenizer.ggml.model"] == "no_vocab"
    arrays = {
        name: tensor.raw.view({"F16": "<f2", "F32": "<f4"}[tensor.type.name]).reshape(tensor.shape)
        for name, tensor in file.tensors.items()
    }
    with safe_open(model / "model.safetensors", framework="np") as tensors:
        assert len(arrays) == len(list(tensors.keys()))
        embedding = tensors.get_tensor("model.embed_tokens.weight")
        norm = tensors.get_tensor("model.layers.1.post_attention_layernorm.weight")
        query = tensors.get_tensor("model.layers.1.self_attn.q_proj.weight")
    assert np.array_equal(arrays["token_embd.weight"], embedding.astype(np.float16))
    assert arrays["blk.1.ffn_norm.weight"].dtype == np.float32
    assert np.array_equal(arrays["blk.1.ffn_norm.weight"], norm)
    _check_rotation(query.astype(np.float16), arrays["blk.1.attn_q.weight"], HEADS["q_proj"])


def _check_rotation(halves: np.ndarray, neighbours: np.ndarray, heads: int) -> None:
    """Check that rotating both, each by its own pairing, gives the same numbers in another
    order."""
    x = np.random.default_rng(0).normal(size=halves.shape[1])
    turns = np.exp(1j * np.linspace(0.1, 2.0, len(halves) // heads // 2))
    h, n = ((m.astype(np.float64) @ x).reshape(heads, -1) for m in (halves, neighbours))
    first, second = np.split(h, 2, axis=1)
    assert np.allclose((first + 1j * second) * turns, (n[:, 0::2] + 1j * n[:, 1::2]) * turns)
    assert not np.allclose(h, n), "the two orders are the same: nothing was shown"


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_keeps_its_sequences_apart(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(model, path, F32)
    threads = torch.get_num_threads()
    with Worker("llama_cpp", sys.executable, threads) as worker:
        worker.start(model=str(path), max_sequences=3, tokens=40, threads=threads, exact_kv=False)
        prompts = make_prompts(model, 30, 3, real=False)
        run = worker.run(prompts, 8)
        together = run.outputs
        assert len(run.steps_s) == 7 and 0 < sum(run.steps_s) < run.seconds
        assert together == [worker.run([prompt], 8).outputs[0] for prompt in prompts]
    assert len({tuple(ids) for ids in together}) == 3


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_llama_cpp_turns_a_file_into_any_type(tmp_path: Path) -> None:
    """Weights are the same as before, the closer the more bits, and those of a quantised source
    are, too."""
    build(tmp_path, "llama", hidden_size=256, intermediate_size=256)
    settings: dict[str, Any] = {"llama": sys.executable, "threads": torch.get_num_threads()}
    eight = ModelFormats(str(tmp_path), "Q8_0", tmp_path, **settings).cbatch_path
    expected = _gate(eight)
    for kind, least in (("F32", 0.99999), ("BF16", 0.9999), ("Q4_0", 0.99), ("Q4_K_M", 0.99)):
        converted = ModelFormats(str(eight), kind, tmp_path, **settings).cbatch_path
        assert torch.cosine_similarity(expected, _gate(converted), dim=0) > least
        assert _gate_type(converted) == {"Q4_K_M": "Q4_K"}.get(kind, kind)


def _gate(path: Path) -> torch.Tensor:
    return read_gguf(path).tensors[_GATE].dequantised(torch.float32).flatten()


def _gate_type(path: Path) -> str:
    return read_gguf(path).tensors[_GATE].type.name


@needs_smollm2
@pytest.mark.skipif(
    importlib.util.find_spec("openvino_genai") is None, reason="needs openvino-genai"
)
def test_openvino_reads_the_same_file_and_keeps_its_sequences_apart(tmp_path: Path) -> None:
    model = ModelFormats("smollm2", None, tmp_path, llama=None, threads=2)
    prompts = make_prompts(model.source, 24, 3, True)
    sizes = {"max_sequences": 4, "tokens": 64, "step_tokens": 32, "threads": 2, "exact": True}
    with Worker("openvino", sys.executable, 2) as worker:
        worker.start(model=str(model.source), **sizes)
        together = worker.run(prompts, 8)
        alone = [worker.run([prompt], 8).outputs[0] for prompt in prompts]
    assert together.outputs == alone and {len(ids) for ids in alone} == {8}
    assert len(together.steps_s) >= 7 and sum(together.steps_s) < together.seconds
