"""Configurations of every family mean what transformers takes them for. What our own pass does not
compute is refused, and wrong fields are named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.runtime.model.config import ModelConfig, ModelError, UnsupportedModelError
from cbatch.runtime.model.config_json import load_config, parse_config
from cbatch.runtime.model.families import families
from tests.runtime.tiny_architectures import tiny_config

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def read(values: dict[str, Any]) -> ModelConfig | None:
    """Read a configuration; return None where a field is missing."""
    try:
        return parse_config(values, Path("config.json"))
    except ModelError as error:
        assert "missing" in str(error), error
        return None


@pytest.mark.parametrize("architecture", families())
def test_absent_fields_mean_what_transformers_takes_them_for(architecture: str) -> None:
    from transformers import AutoConfig

    kind = AutoConfig.for_model(families()[architecture].name)
    if families()[architecture].blocks:  # by default it has blocks that are not supported
        blocks = tiny_config(kind.model_type).layers_block_type
        kind = AutoConfig.for_model(kind.model_type, layers_block_type=blocks)
    names = {"architectures": [architecture]}
    whole = kind.to_dict() | names
    assert read(whole) is not None
    for field in set(whole) - {"architectures", "model_type", "bos_token_id", "eos_token_id"}:
        less = {name: value for name, value in whole.items() if name != field}
        config = read(less)
        if config is not None:
            del less["architectures"]
            assert config == read(type(kind)(**less).to_dict() | names), field


SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8, "head_dim": 16}
SHAPE |= {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
}
OLD_LONG = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [9.0] * 8}


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("GemmaForCausalLM", {"hidden_act": "gelu"}),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3, "rope_local_base_freq": 5000}),
        (
            "Gemma3ForCausalLM",
            {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        ("Cohere2ForCausalLM", {"sliding_window_pattern": 2, "rope_theta": 5e4}),
        (
            "Olmo3ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.2}},
        ),
        ("Phi3ForCausalLM", {"rope_scaling": OLD_LONG, "rope_theta": 2e4}),
        ("PhiForCausalLM", {"partial_rotary_factor": 0.25}),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 3}),
    ],
)
def test_older_spellings_mean_the_same(architecture: str, values: dict[str, Any]) -> None:
    from transformers import AutoConfig

    names = {"architectures": [architecture], "bos_token_id": 1, "eos_token_id": 2}
    given = copy.deepcopy(SHAPE | values)
    newer = AutoConfig.for_model(families()[architecture].name, **given).to_dict()
    assert read(SHAPE | values | names) == read(newer | names)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm: True is not supported"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 33},
            "must be a multiple of the width of an expert, 64; got 33",
        ),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation: 'tanh' is not supported"),
        (
            "phi3",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config",
        ),
        (
            "granitemoe",
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization_config",
        ),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_records_cannot_say_is_left_to_others(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=said):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "qwen3_moe",
            {"num_experts_per_tok": 5},
            "must be at most the 4 experts of a layer, got 5",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: must name 4 layers"),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: must be a positive"),
        ("qwen3_moe", {"mlp_only_layers": 5}, "mlp_only_layers: must be a list of layers"),
        ("qwen3_moe", {"mlp_only_layers": [99]}, "mlp_only_layers: must be .*0 to 3; got"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: must be 4 numbers"),
        ("smollm3", {"no_rope_layers": ["a"] * 4}, "no_rope_layers: must be 4 numbers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 0]}, "no_rope_layers: .*each 0 or 1; got"),
        ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters: must be an object"),
        ("granite", {"residual_multiplier": "a"}, "residual_multiplier: must be a positive"),
        ("mixtral", {"num_local_experts": 1 << 20}, "num_local_experts: must be at most 4096"),
        ("qwen3_moe", {"num_experts": 1 << 20}, "num_experts: must be at most 4096"),
        ("qwen3_moe", {"moe_intermediate_size": 1 << 20}, "moe_intermediate_size: must be at most"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    values = json.loads(json.dumps(tiny_config(kind).to_dict()))
    if "partial_rotary_factor" in changes:
        del values["rope_parameters"]
    names = {"architectures": [n for n, f in families().items() if f.name == kind]}
    with pytest.raises(ModelError, match=said):
        parse_config(values | names | changes, Path("config.json"))
