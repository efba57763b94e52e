from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.config_json import load_config
from tests.runtime.hf_models import ROPE, build, use_old_rope_spelling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write(tmp_path: Path, **changes: Any) -> Path:
    values = {k: v for k, v in {**LLAMA, **changes}.items() if v != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_fields_of_a_plain_config(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    m = config.attention
    assert (config.family, config.num_layers, m.key_dim, m.group) == ("llama", 4, 8, 4)
    assert config.eos_token_ids == (2, 7) and config.bos_token_id == 1
    assert config.torch_dtype == "bfloat16" and m.rope.type == "default"
    assert config.windows == (None,) * 4 and not config.tie_embeddings


def test_layers_of_a_plain_model_differ_in_their_windows_only(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert config.plain and replace(config, layers=()).plain
    layer, *rest = config.layers
    m, f, norm = layer.mixer, layer.feed_forward, config.norm
    assert f is not None and norm is not None
    windowed = replace(layer, mixer=replace(m, window=9))
    assert replace(config, layers=(windowed, *rest)).plain
    for changed in (
        replace(layer, mixer=replace(m, kv_heads=4)),
        replace(layer, mixer=replace(m, rope=replace(m.rope, theta=5.0))),
        replace(layer, feed_forward=replace(f, inner=64)),
    ):
        assert not replace(config, layers=(changed, *rest)).plain
    for final in (None, replace(norm, centred=True), replace(norm, offset=1.0)):
        assert not replace(config, norm=final).plain


def test_a_file_is_as_good_as_its_directory(tmp_path: Path) -> None:
    assert load_config(write(tmp_path) / "config.json") == load_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "rope"), [("llama", rope) for rope in ROPE] + [("qwen3", "yarn")]
)
def test_both_spellings_of_rope_mean_the_same(tmp_path: Path, family: str, rope: str) -> None:
    build(tmp_path, family, rope, num_hidden_layers=1)
    new = load_config(tmp_path)
    use_old_rope_spelling(tmp_path)
    assert load_config(tmp_path) == new
    assert new.attention.rope.type == ROPE[rope]["rope_type"]
    if rope == "yarn_mscale":
        assert 1.0 < new.attention.rope.attention_factor < 1.1


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 2.5}, 1280),
        (YARN | {"original_max_position_embeddings": 512}, 2048),
        (YARN | {"original_max_position_embeddings": 128}, 512),
        (YARN | {"original_max_position_embeddings": 300}, 1200),
        (YARN, 2048),
        ({"rope_type": "yarn", "original_max_position_embeddings": 93}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            512,
        ),
    ],
)
def test_the_context_of_a_stretched_rope(
    tmp_path: Path, rope: dict[str, Any], context: int
) -> None:
    """As in vLLM: yarn multiplies the original length, linear the configured one. Models trained
    with llama3 scaling state the length after it."""
    assert load_config(write(tmp_path, rope_scaling=rope)).max_position_tokens == context


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, (128,) * 4),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 128),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (128, None, 128, None),
        ),
    ],
)
def test_sliding_window_by_layer(
    tmp_path: Path, changes: dict[str, Any], window: tuple[int | None, ...]
) -> None:
    assert load_config(write(tmp_path, **changes)).windows == window


SLIDING = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["FalconForCausalLM"]}, ["architectures", "FalconForCausalLM"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3"]),
        ({"num_local_experts": 8}, ["num_experts", "mixtures of experts"]),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["quantization_config.quant_method", "bitsandbytes", "unquantised weights"],
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
            ["quantization_config.format", "marlin-24", "pack-quantized"],
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}},
            ["quantization_config.checkpoint_format", "gptq_v2"],
        ),
        (
            {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
            ["quantization_config.version", "gemm"],
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            ["quantization_config.weight_block_size", "two numbers"],
        ),
        ({"hidden_size": "absent"}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "positive integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "positive integer"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "does not divide"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "positive number"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            ["rope_scaling.rope_type", "dynamic", "llama3"],
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.short_factor", "4 positive"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing"]),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            ["rope_parameters.low_freq_factor", "missing"],
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, ["rope_theta"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "at most 4096"]),
        ({"num_attention_heads": 2**20}, ["num_attention_heads", "at most 4096"]),
        ({"head_dim": 2**21}, ["head_dim", "at most 4096"]),
        ({"vocab_size": 2**40}, ["vocab_size", "at most 1048576"]),
        ({"max_position_embeddings": 2**64 - 1}, ["max_position_embeddings", "at most 1073741824"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings", "a context of 1 tokens; 2"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e30}},
            ["max_position_embeddings", "a context of 5.12e+32 tokens"],
        ),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps", "at most 1"]),
        ({"eos_token_id": [10**30]}, ["eos_token_id", "must be a token id"]),
        ({"torch_dtype": ["float32"]}, ["torch_dtype", "must be the name of a type"]),
        ({"torch_dtype": "absent", "dtype": 7}, [": dtype", "must be the name of a type"]),
        (SLIDING | {"max_window_layers": "two"}, ["max_window_layers", "an integer of 0 or more"]),
        (SLIDING | {"layer_types": 4}, ["layer_types", "must name 4 layers"]),
        (SLIDING | {"layer_types": [[]] * 4}, ["layer_types", "must name 4 layers"]),
        (SLIDING | {"sliding_window": 2**63}, ["sliding_window", "at most"]),
        ({"architectures": ["x" * 9999]}, ["architectures", "x" * 80 + " is not supported"]),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        load_config(write(tmp_path, **changes))
    assert all(word in str(caught.value) for word in ["config.json", *words])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        load_config(tmp_path)
    for text in ("[" * 100_000, '{"vocab_size": ' + "1" * 9999 + "}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("more", "eos_ids"),
    [({"eos_token_id": 9}, (2, 7, 9)), ({"eos_token_id": [7, 11, 2]}, (2, 7, 11)), ({}, (2, 7))],
)
def test_eos_ids_of_the_generation_config_count_too(
    tmp_path: Path, more: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(more | {"temperature": "odd"}))
    assert load_config(tmp_path).eos_token_ids == eos_ids
    assert load_config(tmp_path / "config.json").eos_token_ids == eos_ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"eos_token_id": ', "cannot be read as JSON"),
        ("[2]", "must hold a JSON object, got list"),
        ('{"eos_token_id": [2, "</s>"]}', "eos_token_id: must be a token id or a list of them"),
    ],
)
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"generation_config\.json: {re.escape(words)}"):
        load_config(tmp_path)
