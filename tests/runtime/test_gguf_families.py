"""Every architecture of GGUF files: a table of tiny models. A file computes what its directory
does, and a file that does not fit its architecture is refused in one line."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bench.peers.gguf_converter import architecture_of, convert
from cbatch.runtime.cpu import layers, torch_pass
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import ModelConfig, ModelError
from cbatch.runtime.model.gguf_architectures import architectures
from cbatch.runtime.model.gguf_file import TYPES, BlockType, Gguf, GgufTensor, read_gguf
from cbatch.runtime.model.gguf_model import config_of
from cbatch.runtime.model.records import Attention, Experts, Recurrence
from tests.gguf_files import Q8_0, gguf_bytes
from tests.runtime.hf_models import paged, run_all
from tests.runtime.marks import needs_compiler
from tests.runtime.mutations import EXTREMES, REALS, TEXTS
from tests.runtime.test_every_family import CHANGES, CONVOLVED, GRANITE, LONG, make
from tests.runtime.test_transformers_backend import sequences

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

# Of EXAONE 4 with windows; layers without a window have no rope.
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# What files can say of the cases of each family, by `model_type`.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 8}),
    ("mixtral", {}),
    ("ministral3", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", CHANGES["gemma2"][0]),
    ("gemma3_text", CHANGES["gemma3_text"][0]),
    ("gemma4_text", CHANGES["gemma4_text"][0]),
    ("gemma4_text", CHANGES["gemma4_text"][1]),
    ("phi", {}),
    ("phi3", {"sliding_window": 9}),
    ("phi3", CHANGES["phi3"][1]),
    ("smollm3", {}),
    ("arcee", {}),
    ("ernie4_5", {"use_bias": True}),
    ("exaone4", {"rope_parameters": LLAMA3}),
    ("seed_oss", {"attention_out_bias": True}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("granite", CHANGES["granite"][0]),
    ("glm4", {}),
    ("starcoder2", {"sliding_window": None}),
    ("stablelm", {"use_qkv_bias": True}),
    ("nemotron", {}),
    ("cohere", {}),
    ("cohere2", {}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 192}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("granitemoe", CHANGES["granitemoe"][0]),
    ("olmoe", {}),
    ("gpt_oss", {"rope_parameters": CHANGES["gpt_oss"][0]["rope_parameters"]}),
    ("lfm2", {"layer_types": CONVOLVED}),
    ("lfm2_moe", {"layer_types": CONVOLVED}),
    ("granitemoehybrid", GRANITE | {"position_embedding_type": "rope"}),
    ("granitemoehybrid", CHANGES["granitemoehybrid"][1] | {"intermediate_size": 96}),
    ("nemotron_h", {"mlp_bias": True}),
    ("qwen3_next", {"norm_topk_prob": True}),
    ("qwen3_5_text", {}),
    ("qwen3_5_text", {"linear_num_key_heads": 4}),
    ("qwen3_5_moe_text", {}),
    ("falcon_h1", {}),
    ("falcon_h1", {"mamba_rms_norm": True}),
]
SQUARE = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
# Changes for llama.cpp. It ignores windows of Llama, Phi 3 and small EXAONE 4, some biases, and
# `truncate = false` of yarn. Its shortest context has the long factors of a tiny Phi 3. OLMoE must
# have as many KV heads as heads. In Gemma 4 it shares the K and V of the last two layers that have
# them, and caps logits at 30 if a file has no cap.
FOR_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None, "max_position_embeddings": 2048}
    | {"original_max_position_embeddings": 1024},
    "ernie4_5": {"use_bias": False},
    "exaone4": {"num_hidden_layers": 64, "layer_types": None},
    "seed_oss": {"attention_out_bias": False},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "olmoe": {"num_key_value_heads": 4},
    "qwen3_next": SQUARE,
    "qwen3_5_text": SQUARE,
    "qwen3_5_moe_text": SQUARE,
    "gemma4_text": {"num_kv_shared_layers": 2, "final_logit_softcapping": 5.0},
}
GELU = ("gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "starcoder2")
ARRAYS = [], ["a", "b"], np.array([]), np.array([1, 2]), np.array([True, False] * 2), np.ones(4)
ODD: tuple[Any, ...] = (*EXTREMES, *REALS, *TEXTS, True, -1, *ARRAYS)
IDS = [f"{kind}-{i}" for i, (kind, _) in enumerate(CASES)]


@functools.cache
def made(case: int) -> tuple[Path, Path]:
    """Make the directory and the file of a case once."""
    kind, changes = CASES[case]
    folder = Path(tempfile.mkdtemp(prefix="gguf-"))
    make(kind, folder, **changes)
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(*convert(folder)))
    return folder, path


def logits(path: Path, *rows: np.ndarray, **options: Any) -> torch.Tensor:
    model, tokens = load_model(path, **options), rows or sequences((40, 11))
    kv = KVCache(model.config, 30, 4, model.dtype, "cpu", num_pages=30, num_slots=2)
    return run_all(model, kv, paged(kv, tokens), [1, 5, 7], firsts=[9, 4][: len(tokens)])


@needs_compiler
@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_a_file_computes_what_its_directory_does(case: int) -> None:
    """The bits are the same: in fp32 a converter rounds nothing that our pass does not round.
    Products of heads in another order are other sums, and multipliers are rounded elsewhere."""
    folder, path = made(case)
    one, other = open_checkpoint(path).config, open_checkpoint(folder).config
    for field in ("family", "windows", "max_position_tokens", "tie_embeddings"):
        assert getattr(one, field) == getattr(other, field)
    tiled = any(isinstance(m, Recurrence) and m.tiled for m in mixers(one))
    assert tiled == architectures()[architecture_of(folder)].changes.get("tiled", False)
    of_file, of_folder = logits(path), logits(folder)
    if (tiled and "linear_num_key_heads" not in CASES[case][1]) or one.family == "falcon_h1":
        assert (of_file - of_folder).abs().max() < 1e-4 * of_folder.std()
    else:
        assert torch.equal(of_file, of_folder)


def forwards(config: ModelConfig) -> list[Any]:
    return [layer.feed_forward for layer in config.layers]


def mixers(config: ModelConfig) -> list[Attention | Recurrence]:
    return [layer.mixer for layer in config.layers]


@needs_compiler
@pytest.mark.parametrize(
    "kind",
    [
        *("phi3", "glm4", "gemma3_text", "olmoe", "granitemoe", "qwen2_moe"),
        *("lfm2", "granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_text"),
    ],
)
def test_quantised_matrices(kind: str) -> None:
    """Products take parts of fused matrices and experts as stored. Shared experts are widened."""
    folder, _ = made(next(i for i, case in enumerate(CASES) if case[0] == kind))
    path = folder / "quantised.gguf"
    path.write_bytes(gguf_bytes(*convert(folder, Q8_0)))
    model = load_model(path)
    products = [layer.qkv.compiled for layer in model.layers]
    assert all(each is not None and each.block_types == ("Q8_0",) for each in products)
    assert probe_batch_invariance(model).batch_invariant
    experts = model.layers[0].experts
    if experts is not None:
        shared = any(isinstance(f, Experts) and f.shared for f in forwards(model.config))
        assert (experts.products[0].block_types == ("Q8_0",)) == (not shared)
    widened = logits(path, dtype="float32")
    far = (logits(path) - widened).norm(dim=1) / widened.norm(dim=1)
    assert 1e-5 < far.median() < 0.08  # rounding changes a choice of experts now and then


def test_the_table_knows_every_architecture_and_no_other() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert {architecture_of(made(case)[0]) for case in range(len(CASES))} == set(architectures())
    assert set(architectures()) <= known


@needs_compiler
def test_layers_that_draft_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A file with multi-token prediction: `nextn` layers after the last."""
    _, good = made(CASES.index(("qwen3_5_text", {})))
    metadata, tensors = convert(good.parent)
    last = [name for name in tensors if name.startswith("blk.3.")]
    drafting = {name.replace("blk.3.", "blk.4."): tensors[name] for name in last}
    drafting["blk.4.nextn.eh_proj.weight"] = tensors["token_embd.weight"]
    metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = good.parent / "drafting.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors | drafting))
    assert torch.equal(logits(path), logits(good))
    assert [each.getMessage() for each in caplog.records if each.name == "cbatch"] == [
        f"{path}: its layers for multi-token prediction are left out"
    ]


def refusal(file: Gguf) -> str | None:
    try:
        config_of(file)
    except ModelError as error:
        message = str(error)
        assert "\n" not in message and message.startswith(f"{file.path}: ")
        return message
    return None


def blank(tensor: GgufTensor, shape: tuple[int, ...], kind: BlockType = TYPES[0]) -> GgufTensor:
    size = math.prod(shape) // kind.elements * kind.bytes
    return GgufTensor(tensor.name, kind, shape, np.zeros(size, np.uint8))


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_a_tensor_that_does_not_fit_is_refused(case: int) -> None:
    """Missing, unknown, misshapen, and quantised vectors."""
    file = read_gguf(made(case)[1])
    assert refusal(file) is None
    for name, tensor in file.tensors.items():
        if not name.startswith(("blk.", "rope_factors_long")) or name.startswith("blk.1."):
            others = {key: each for key, each in file.tensors.items() if key != name}
            odd = [blank(tensor, (*tensor.shape[:-1], tensor.shape[-1] + 32))]
            odd.append(blank(tensor, (2, *tensor.shape)))
            if len(tensor.shape) == 1 and tensor.shape[0] % 32 == 0:
                odd.append(blank(tensor, tensor.shape, TYPES[8]))
            for other in odd:
                message = refusal(replace(file, tensors=others | {name: other}))
                assert message, name
                assert f"tensor {name}: " in message or name == "token_embd.weight"
            optional = ["output.weight", "rope_freqs.weight"]
            if CASES[case][0] == "gemma4_text":  # without V, values are keys
                optional = [optional[0], "blk.1.attn_v.weight"]
            if name not in optional:
                assert refusal(replace(file, tensors=others)), name
            extra = {f"{name.removesuffix('weight')}scale": tensor}
            assert "is not a tensor of a" in str(
                refusal(replace(file, tensors=file.tensors | extra))
            )


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_metadata_are_read_or_refused(case: int) -> None:
    file = read_gguf(made(case)[1])
    for key in file.metadata:
        for odd in ODD:
            refusal(replace(file, metadata=file.metadata | {key: odd}))
        refusal(replace(file, metadata={k: v for k, v in file.metadata.items() if k != key}))


def test_factors_of_long_contexts(tmp_path: Path) -> None:
    case = next(i for i, (_, changes) in enumerate(CASES) if changes.get("rope_parameters") == LONG)
    assert open_checkpoint(made(case)[1]).config.max_position_tokens == 64


@needs_compiler
@pytest.mark.skipif("LLAMA_CPP_PYTHON" not in os.environ, reason="LLAMA_CPP_PYTHON is not set")
def test_logits_are_those_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLAMA_CPP_PYTHON names an interpreter with llama-cpp-python 0.3.36. It has a table of GELU
    in fp16, and so has our torch pass here; a rounding may still fall the other way."""
    exact = torch_pass.ACTIVATIONS["gelu_tanh"]
    gelu = {"gelu_tanh": lambda x: exact(x.half().float()).half().float()}
    rows = sequences((40, 11))
    for i, row in enumerate(rows):
        np.save(tmp_path / f"row{i}.npy", row)
    for name, (kind, changes) in zip(IDS, CASES, strict=True):
        make(kind, tmp_path / name, **changes | FOR_LLAMA_CPP.get(kind, {}))
        (tmp_path / f"{name}.gguf").write_bytes(gguf_bytes(*convert(tmp_path / name)))
    script = Path(__file__).with_name("llama_cpp_logits.py")
    subprocess.run([os.environ["LLAMA_CPP_PYTHON"], script, tmp_path], check=True)
    far = {}
    for name, (kind, _) in zip(IDS, CASES, strict=True):
        expected = torch.from_numpy(np.load(tmp_path / f"{name}.gguf.npy"))
        with monkeypatch.context() as patched:
            if kind in GELU:
                patched.setattr(layers, "compiles", lambda dtype: False)
                patched.setattr(torch_pass, "ACTIVATIONS", torch_pass.ACTIVATIONS | gelu)
            computed = torch.cat([logits(tmp_path / f"{name}.gguf", row) for row in rows])
        distance = ((computed - expected).abs().max() / expected.std()).item()
        if distance > (1e-3 if kind in GELU else 1e-4 if "qwen3_" in kind else 1e-5):
            far[name] = distance
    assert not far
