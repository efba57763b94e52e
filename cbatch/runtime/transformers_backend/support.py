"""Models that the transformers backend cannot serve, recognised by `config.json` alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cbatch.runtime.model.config import ModelError, read_json_object

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_STATEFUL = {
    "bamba": "Mamba layers",
    "falcon_h1": "Mamba layers",
    "falcon_mamba": "Mamba layers",
    "granitemoehybrid": "Mamba layers",
    "jamba": "Mamba layers",
    "kimi_linear": "linear attention",
    "lfm2": "convolutions",
    "lfm2_moe": "convolutions",
    "mamba": "Mamba layers",
    "mamba2": "Mamba layers",
    "minimax": "linear attention",
    "nemotron_h": "Mamba layers",
    "olmo_hybrid": "linear attention",
    "qwen3_5_moe_text": "linear attention",
    "qwen3_5_text": "linear attention",
    "qwen3_next": "linear attention",
    "recurrent_gemma": "recurrent blocks",
    "rwkv": "recurrent blocks",
    "xlstm": "recurrent blocks",
    "zamba": "Mamba layers",
    "zamba2": "Mamba layers",
}
_BY_LAYER_TYPES = ("lfm2", "lfm2_moe")  # some checkpoints of these have attention layers only
_SPARSE = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")
_OTHER_MODES = ("vision_config", "audio_config", "vision_tower", "image_token_id")
_ENCODERS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_DECODERS = ("ForCausalLM", "LMHeadModel")


def refuse_unsupported(path: Path) -> None:
    """Raise ModelError if a directory's model is no text decoder, or keeps state other than KV."""
    problem = problem_of(read_json_object(path / "config.json"))
    if problem is not None:
        raise ModelError(f"{path / 'config.json'}: {problem}")


def problem_of(values: dict[str, Any]) -> str | None:
    """Return why a model of this configuration is not served, or None."""
    kind = values.get("model_type")
    if not isinstance(kind, str):
        return "model_type: missing; it names the architecture"
    architectures = values.get("architectures") or [kind]
    name = ", ".join(map(str, architectures))
    if values.get("is_encoder_decoder"):
        return f"architectures: {name} is an encoder with a decoder; use a decoder of text"
    if any(field in values for field in _OTHER_MODES):
        return f"architectures: {name} is multimodal; use its text model, if it has one"
    if all(str(each).endswith(_ENCODERS) for each in architectures):
        return f"architectures: {name} is an encoder; use a decoder of text"
    if values.get("architectures") and not any(str(a).endswith(_DECODERS) for a in architectures):
        return f"architectures: {name} does not predict the next token; use a model for causal LM"
    if quantised := values.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
        return (
            f"quantization_config: {method}: transformers' modelling code supports "
            "unquantised weights only; use a checkpoint that is not quantised"
        )
    if "auto_map" in values and find_spec(f"transformers.models.{kind}") is None:
        return f"auto_map: {name} has its own code, which is not run"
    return _state_of(values, kind, name)


def _state_of(values: dict[str, Any], kind: str, name: str) -> str | None:
    kinds = values.get("layer_types") or ()
    other = sorted({str(each) for each in kinds} - _ATTENTION)
    if other:
        return f"layer_types: {name} keeps state that is not attention ({', '.join(other)})"
    if kind in _STATEFUL and not (kind in _BY_LAYER_TYPES and kinds):
        return f"model_type: {name} keeps state that is not attention ({_STATEFUL[kind]})"
    if kind in _SPARSE:
        return f"model_type: {name} uses sparse attention with an index, which is not supported"
    return None


def refuse_unknown_rope(path: Path) -> None:
    """Raise ModelError for a rope type that transformers does not know; its own error is a bare
    KeyError."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    file, known = path / "config.json", ["default", *ROPE_INIT_FUNCTIONS]
    for field in ("rope_scaling", "rope_parameters"):
        rope = read_json_object(file).get(field)
        ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
        for rope_config in [rope_config for rope_config in ropes if isinstance(rope_config, dict)]:
            if (
                kind := rope_config.get("rope_type", rope_config.get("type", "default"))
            ) not in known:
                problem = f"{kind!r:.40} is not supported; supported: {', '.join(known)}"
                raise ModelError(f"{file}: {field}.rope_type: {problem}")
