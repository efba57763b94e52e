"""Unsupported features are rejected by name, and the README lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, FieldError
from cbatch.engine.model_files import refuse_model_files
from cbatch.engine.unsupported import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_OPTIONS,
    without_neutral_fields,
)
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.config_json import parse_config

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def test_the_readme_lists_unsupported_features() -> None:
    table = README.split("## What it does not do")[1].split("\n## ")[0].lower()
    missing = "tool calls, quantised weights, gguf, lora, state-space, tensor parallelism"
    missing += ", eagle, mtp, kv offload, embeddings, multimodal"
    for name in missing.split(", "):
        assert name in table, name


@pytest.mark.parametrize("option", sorted(UNSUPPORTED_OPTIONS))
def test_options_of_other_engines(option: str) -> None:
    with pytest.raises(FieldError, match=f"^{option}: .* is not supported"):
        LLM("/nowhere", **{option: 2})


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_FIELDS))
def test_fields_of_requests(field: str) -> None:
    with pytest.raises(FieldError, match=f"^{field}: .* is not supported"):
        without_neutral_fields({field: {"anything": 2}})
    for neutral in (None, *UNSUPPORTED_FIELDS[field].neutral):
        assert without_neutral_fields({field: neutral, "n": 2}) == {"n": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config.quant_method: 'bitsandbytes' is not supported; .*unquantised",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3 is not supported"),
        ({"architectures": None, "model_type": "medusa"}, "'medusa' is not supported"),
        ({"architectures": ["BertModel"]}, "BertModel is not supported"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "Llava.* is not supported"),
    ],
)
def test_models(change: dict[str, Any], words: str) -> None:
    parse_config(LLAMA, Path("config.json"))
    with pytest.raises(ModelError, match=words):
        parse_config(LLAMA | change, Path("config.json"))


def test_model_files(tmp_path: Path) -> None:
    refuse_model_files(tmp_path, "model")
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(FieldError, match="draft: LoRA"):
        refuse_model_files(tmp_path, "draft")
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "weights-q4.gguf").touch()
    with pytest.raises(FieldError, match="folder of GGUF files; name one, say .*weights-q4.gguf"):
        refuse_model_files(tmp_path, "model")


def test_a_missing_model() -> None:
    with pytest.raises(FieldError, match="model: /nowhere/at/all: no such model"):
        LLM("/nowhere/at/all")
