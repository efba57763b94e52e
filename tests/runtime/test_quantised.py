"""Quantised checkpoints in formats written from their definitions, compared with the values they
encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from cbatch.runtime.compiled import compiles
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.records import Experts
from tests.runtime.hf_models import build, paged, run_all, tokens_of
from tests.runtime.marks import needs_compiler
from tests.runtime.test_every_family import make

GROUP, BLOCK = 32, (48, 40)
UP = "model.layers.1.mlp.up_proj"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 199}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class Format(NamedTuple):
    method: str
    bits: int = 4
    zeros: bool = False  # zero points of their own
    sorted: bool = False  # columns were sorted by importance
    more: dict[str, Any] = {}


FORMATS = {
    "packed": Format("compressed-tensors", more={"format": "pack-quantized"}),
    "packed zeros": Format("compressed-tensors", zeros=True, more={"format": "pack-quantized"}),
    "packed 8": Format("compressed-tensors", 8, more={"format": "pack-quantized"}),
    "gptq": Format("gptq"),
    "gptq 8": Format("gptq", 8),
    "gptq sorted": Format("gptq", sorted=True),
    "gptq zeros v2": Format("gptq", zeros=True, more={"checkpoint_format": "gptq_v2"}),
    "awq": Format("awq", zeros=True),
    "awq middle": Format("awq"),
}
BLOCKS = {"packed": "Q4_0", "packed zeros": "Q4_1", "packed 8": "Q8_0", "gptq": "Q4_0"}
BLOCKS |= {"gptq 8": "Q8_0", "gptq zeros v2": "Q4_1", "awq": "Q4_1", "awq middle": "Q4_0"}


def packed(values: NDArray[np.int64], bits: int, order: Any = None) -> Tensor:
    """Pack [rows, n] to [rows, words]: of each run, value `order[j]` goes to place j, from the
    lowest."""
    per = 32 // bits
    words = np.zeros((len(values), values.shape[1] // per), dtype=np.int64)
    for word in range(words.shape[1]):
        for place in range(per):
            taken = place if order is None else order[place]
            words[:, word] |= values[:, word * per + taken] << (bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32)).contiguous()


def written(
    kind: Format, shape: tuple[int, int], rng: np.random.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a matrix in a format, and its values in fp64."""
    (out, columns), bits = shape, kind.bits
    groups, levels = columns // GROUP, 1 << bits
    codes = rng.integers(0, levels, shape)
    zeros = np.full((out, groups), levels // 2)
    if kind.zeros:
        zeros = rng.integers(1, levels, (out, groups))
    scales = torch.from_numpy(rng.uniform(0.01, 0.03, (out, groups))).half()
    group_of = np.arange(columns) // GROUP
    if kind.sorted:
        group_of = rng.permutation(group_of)
    values = (codes - zeros[:, group_of]) * scales.double().numpy()[:, group_of]
    if kind.method == "compressed-tensors":
        tensors = {"weight_packed": packed(codes, bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(shape)
        if kind.zeros:
            tensors["weight_zero_point"] = packed(zeros.T, bits).t().contiguous()
    elif kind.method == "gptq":
        shift = 0 if kind.more.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {"qweight": packed(codes, bits).t(), "qzeros": packed((zeros - shift).T, bits)}
        tensors |= {"scales": scales.t(), "g_idx": torch.from_numpy(group_of).int()}
    else:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": packed(codes.T, bits, order), "qzeros": packed(zeros.T, bits, order)}
        tensors |= {"scales": scales.t()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, torch.from_numpy(values)


def directory(
    folder: Path, kind: Format, family: str = "llama"
) -> tuple[Path, Path, dict[str, Tensor]]:
    """Write a model with quantised matrices, and the same with their values; return the values by
    name."""
    full, folder = folder / "full", folder / "quantised"
    if family == "llama":
        build(full, "llama", num_hidden_layers=2, tie_word_embeddings=False)
    else:
        make(family, full, **SHAPE)
    tensors, rng = load_file(full / "model.safetensors"), np.random.default_rng(3)
    small, wide, values = dict(tensors), dict(tensors), {}
    for name, tensor in tensors.items():
        is_matrix = name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
        if is_matrix and tensor.shape[1] % GROUP == 0:
            module = name.removesuffix(".weight")
            parts, values[name] = written(kind, tuple(tensor.shape), rng)
            del small[name]
            small |= {f"{module}.{part}": t for part, t in parts.items()}
            wide[name] = values[name].float()
    config = json.loads((full / "config.json").read_text())
    folder.mkdir()
    save_file(small, folder / "model.safetensors")
    save_file(wide, full / "model.safetensors")
    description = {"quant_method": kind.method, "bits": kind.bits} | kind.more
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": description}))
    return folder, full, values


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_what_its_format_says(name: str, tmp_path: Path) -> None:
    folder, _, values = directory(tmp_path, FORMATS[name])
    _, weights, _ = open_checkpoint(folder, "auto")
    kinds = set()
    for matrix, expected in values.items():
        assert torch.equal(
            weights.get(matrix, tuple(expected.shape)).double(), expected.float().double()
        )
        blocks = weights.blocks(matrix)
        if blocks is not None:
            kinds.add(blocks.type.name)
            dequantised = blocks.dequantised(torch.float32).double()
            step = 0.03 / 130 if blocks.type.name == "Q4_1" else 0.0
            assert (dequantised - expected).abs().max() <= step
    assert kinds == ({BLOCKS[name]} if name in BLOCKS else set())
    assert weights.blocks("lm_head.weight") is None


def logits_of(folder: Path, dtype: str) -> Tensor:
    model = load_model(folder, dtype=dtype)
    kv = KVCache(model.config, 16, 4, model.dtype, model.device)
    sequences = paged(kv, [tokens_of(1, 20), tokens_of(2, 9)])
    with torch.inference_mode():
        return run_all(model, kv, sequences, [5, 3]).float()


@pytest.mark.parametrize("name", ["packed", "gptq sorted", "awq"])
def test_a_model_answers_as_with_full_weights(name: str, tmp_path: Path) -> None:
    """With widened weights the output is the same. With blocks, rows are rounded to 8 bits, as for
    GGUF files."""
    folder, full, _ = directory(tmp_path, FORMATS[name])
    expected = logits_of(full, "float32")
    torch.testing.assert_close(logits_of(folder, "float32"), expected, rtol=1e-4, atol=1e-4)
    computed = logits_of(folder, "auto")
    assert torch.cosine_similarity(computed, expected).min() > 0.995
    # Columns in another order cannot be blocks, and without kernels there are no blocks.
    widened = FORMATS[name].sorted or not compiles(torch.float32)
    assert torch.equal(computed, logits_of(folder, "float32")) == widened


@needs_compiler
@pytest.mark.parametrize("family", ["arcee", "gemma3_text", "mixtral", "qwen2_moe"])
def test_a_family_that_differs_by_flags_may_be_quantised(family: str, tmp_path: Path) -> None:
    folder, full, _ = directory(tmp_path, FORMATS["gptq"], family)
    expected = logits_of(full, "float32")
    torch.testing.assert_close(logits_of(folder, "float32"), expected, rtol=1e-4, atol=1e-4)
    computed = logits_of(folder, "auto")
    # Where a rounded row chooses other experts, the logits differ more.
    assert torch.cosine_similarity(computed, expected).quantile(0.3) > 0.995
    assert not torch.equal(computed, expected)  # as blocks
    config, weights, _ = open_checkpoint(folder, "auto")
    if isinstance(f := config.feed_forward, Experts):
        for name, shape in (("gate_up", (2 * f.inner, 64)), ("down", (64, f.inner))):
            stacked = f"model.layers.1.mlp.experts.{name}_proj"
            blocks, values = weights.blocks(stacked), weights.get(stacked, (f.count, *shape))
            assert blocks is not None and torch.equal(blocks.dequantised(torch.float32), values)
        types = {part.block_types for part in load_model(folder).layers[1].experts.products}
        assert types == ({("Q4_0",)} if not f.shared else {()})


@needs_compiler
def test_a_query_may_have_a_gate(tmp_path: Path) -> None:
    folder, _, values = directory(tmp_path, FORMATS["gptq"], "qwen3_5_text")
    load_model(folder)
    name = "model.layers.3.self_attn.q_proj.weight"
    blocks = open_checkpoint(folder, "auto").weights.blocks(name)
    assert blocks is not None and blocks.shape == values[name].shape == (2 * 4 * 16, 64)


def with_mxfp4(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a gpt_oss with experts in MXFP4; return their values by our names, as transformers
    widens them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    make("gpt_oss", folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
        count, columns, out = tensors.pop(name).shape
        size = (count, out, columns // 32)
        codes = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, size, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        wide = convert_moe_packed_tensors(codes.clone(), scales.clone(), dtype=torch.float32)
        values[name] = wide.contiguous()
    save_file(tensors | changes, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_mxfp4_is_what_transformers_widens(tmp_path: Path) -> None:
    """transformers has [experts, inputs, outputs], whose gates and ups alternate."""
    values = with_mxfp4(tmp_path)
    _, weights, _ = open_checkpoint(tmp_path, "auto")
    assert len(values) == 8
    for name, wide in values.items():
        expected = wide.transpose(1, 2)
        if "gate_up" in name:
            expected = torch.cat([expected[:, ::2], expected[:, 1::2]], 1)
        assert torch.equal(weights.get(name, tuple(expected.shape)), expected)
        blocks = weights.blocks(name)
        assert blocks is not None and blocks.type.name == "MXFP4"
        assert torch.equal(blocks.dequantised(torch.float32), expected)
    name = "model.layers.1.mlp.experts.down_proj"
    with_mxfp4(tmp_path, **{f"{name}_scales": torch.zeros(4, 64, 3, dtype=torch.uint8)})
    with pytest.raises(ModelError, match=r"down_proj: torch.uint8 \[4, 64, 3\] is not uint8"):
        open_checkpoint(tmp_path, "auto")[1].blocks(name)


@pytest.mark.parametrize("kind", ["blocks", "rows", "one"])
def test_fp8_is_widened_by_its_scales(kind: str, tmp_path: Path) -> None:
    build(tmp_path, "llama", num_hidden_layers=2, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(5)
    weight = torch.from_numpy(rng.normal(size=(96, 64))).to(torch.float8_e4m3fn)
    sizes = {"blocks": (2, 2), "rows": (96, 1), "one": (1,)}
    scale = torch.from_numpy(rng.uniform(0.1, 0.2, sizes[kind])).float()
    expected = weight.double()
    for i in range(96):
        for j in range(64):
            at = {"blocks": (i // BLOCK[0], j // BLOCK[1]), "rows": (i, 0), "one": (0,)}[kind]
            expected[i, j] *= scale[at].double()
    tensors[f"{UP}.weight"] = weight
    tensors[f"{UP}.weight_scale{'_inv' if kind == 'blocks' else ''}"] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    description: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    if kind != "blocks":
        description = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": description}))
    _, weights, _ = open_checkpoint(tmp_path, "float32")
    widened = weights.get(f"{UP}.weight", (96, 64)).double()
    assert ((widened - expected).abs() <= expected.abs() * 1e-6).all()
    assert weights.blocks(f"{UP}.weight") is None
    del tensors[f"{UP}.weight_scale{'_inv' if kind == 'blocks' else ''}"]
    save_file(tensors, tmp_path / "model.safetensors")
    _, weights, _ = open_checkpoint(tmp_path, "float32")
    with pytest.raises(ModelError, match="weight_scale: is missing"):
        weights.get(f"{UP}.weight", (96, 64))


@pytest.mark.parametrize(
    "part, made, words",
    [
        ("weight_packed", torch.zeros(96, 9, dtype=torch.int32), r"\[96, 9\], not \[96, 64\]"),
        ("weight_packed", torch.zeros(96, 8), "is not a matrix of int32"),
        ("weight_scale", torch.full((96, 2), torch.inf), "not finite scales"),
        ("weight_scale", torch.ones(95, 2), "not finite scales"),
        ("weight_scale", torch.ones(96, 0), "not finite scales"),
        ("weight_g_idx", torch.full((64,), 2, dtype=torch.int32), "not one of 2 groups"),
        ("weight_zero_point", torch.zeros(3, 2, dtype=torch.int8), r"holds \[3, 2\]"),
    ],
)
def test_what_does_not_fit_is_named(part: str, made: Tensor, words: str, tmp_path: Path) -> None:
    folder, _, _ = directory(tmp_path, FORMATS["packed"])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{UP}.{part}": made}, folder / "model.safetensors")
    _, weights, _ = open_checkpoint(folder, "auto")
    with pytest.raises(ModelError, match=rf"{part}: .*{words}"):
        weights.blocks(f"{UP}.weight")
