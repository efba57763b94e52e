"""The config of a GGUF file: its metadata as the `config.json` of the same model."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.end_tokens import END_TOKENS, HARMONY_END_TOKENS
from cbatch.runtime.model.families import Family
from cbatch.runtime.model.gguf_architectures import GgufArchitecture, architectures
from cbatch.runtime.model.gguf_file import Gguf
from cbatch.runtime.model.gguf_tensors import (
    EMBEDDING,
    ROPE_FACTORS,
    SHORT_FACTORS,
    check_tensors,
)
from cbatch.runtime.model.records import Attention

# Fields of config.json -> their GGUF keys, without the prefix of the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "rope_scaling.rope_type": "rope.scaling.type",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_scaling.attention_factor": "rope.scaling.attn_factor",
    "rope_scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys with a single supported value.
_ONLY_SUPPORTED_VALUES = {
    "attention.causal": True,
    "attention.scale": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "attention.clamp_kqv": 0.0,
    "use_parallel_residual": False,
    "rope.dimension_sections": None,
    "nextn_predict_layers": 0,
    "expert_weights_scale": 1.0,
    "expert_group_count": 0,
}
_MAY_BE_0 = "num_key_value_heads", "intermediate_size"  # in layers of a model with recurrent ones
_CONTROL = 3  # the token type of control tokens
_MAX_NAME_CHARS = 64  # of metadata strings that are names


def config_of(file: Gguf) -> ModelConfig:
    """Return the config of a GGUF file. Raises ModelError naming the file and the key or tensor."""
    arch, tensors = _scalar(file, "general.architecture"), file.tensors
    if arch not in architectures():
        problem = f"{arch!r} is not supported; supported: {', '.join(architectures())}"
        raise file.error("general.architecture", problem)
    entry = architectures()[arch]
    for key, allowed in (_ONLY_SUPPORTED_VALUES | entry.required).items():
        if key in entry.ignored:
            continue
        value = _scalar(file, f"{arch}.{key}", allowed)
        if value != allowed and key not in entry.keys.values():
            raise file.error(f"{arch}.{key}", f"{value!r} is not supported; supported: {allowed!r}")
    if EMBEDDING not in tensors:
        raise file.error(f"tensor {EMBEDDING}", "is missing")
    family = entry.family_of(
        windowed=bool(_scalar(file, f"{arch}.attention.sliding_window")),
        experts=bool(_scalar(file, f"{arch}.expert_count")),
        qkv_bias=_has(file, "attn_q.bias") or _has(file, "attn_qkv.bias"),
        out_bias=_has(file, "attn_output.bias"),
        mlp_bias=_has(file, "ffn_up.bias"),
    )
    values, names = _values(file, arch, entry, family)
    config = parse_config(values, file.path, names, family)
    _check_tokens(file, config, names)
    if ROPE_FACTORS in tensors:
        config = _with_factors(file, config)
    check_tensors(file, config)
    return config


def _values(
    file: Gguf, arch: str, entry: GgufArchitecture, family: Family
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of config.json, and the key that each of them comes from."""
    keys = _KEYS | _recurrence_keys(family) | entry.keys
    kind = "layer_norm_epsilon" if family.norm.get("centred") else "layer_norm_rms_epsilon"
    keys[family.eps] = f"attention.{kind}"
    if family.experts is not None:
        expert_key = "expert_feed_forward_length"
        if family.experts.width not in keys or f"{arch}.{expert_key}" in file.metadata:
            keys[family.experts.width] = expert_key
        if family.experts.shared:
            keys[family.experts.shared] = "expert_shared_feed_forward_length"
    names = {field: f"{arch}.{key}" for field, key in keys.items()}
    by_layer = {"sliding_window_pattern"}
    if family.recurrence is not None:
        by_layer.update(_MAY_BE_0)
    values = {field: _scalar(file, key) for field, key in names.items() if field not in by_layer}
    values |= {field: value for field, value in entry.values.items() if values.get(field) is None}
    if values[family.eps] is None:
        raise file.error(names[family.eps], "is missing")
    layers = values["num_hidden_layers"]
    if isinstance(layers, int) and layers > len(file.tensors):
        raise file.error(names["num_hidden_layers"], f"{layers} for {len(file.tensors)} tensors")
    drafting = _scalar(file, f"{arch}.nextn_predict_layers", 0)
    if type(layers) is int and type(drafting) is int and 0 < drafting < layers:
        layers = values["num_hidden_layers"] = layers - drafting
    values |= _recurrence_values(file, names, family, values)
    if layers == entry.width_scaled_layers:
        values["query_pre_attn_scalar"] = _width_of_heads(values)
    values |= _head_dims(file, arch, family, values) | _window_pattern(file, names)
    values |= {
        "rope_parameters": None,
        "sliding_window": values["sliding_window"] or None,
        "num_experts": values["num_experts"] or None,
        "num_local_experts": None if family.experts is None else values["num_experts"] or 0,
        "rope_scaling": _rope_scaling(file, arch, values),
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _scalar(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file),
        "torch_dtype": _dtype(file),
    }
    for name in ("bos", "eos"):
        names[f"{name}_token_id"] = f"tokenizer.ggml.{name}_token_id"
    for field in ("rope_scaling", "rope_parameters"):
        names[f"{field}.partial_rotary_factor"] = f"{arch}.rope.dimension_count"
    names["rope_scaling.short_factor"] = f"tensor {SHORT_FACTORS}"
    return values, names


def _width_of_heads(values: dict[str, Any]) -> Any:
    """Return the width of a head that no key names; None without valid fields."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    return hidden // heads if type(hidden) is int and type(heads) is int and heads else None


def _head_dims(file: Gguf, arch: str, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """Return the size of a head and the share of it that rotates. Raises ModelError for sizes that
    no family has."""
    rotated_key, value_key = f"{arch}.rope.dimension_count", f"{arch}.attention.value_length"
    rotated, width = _scalar(file, rotated_key), values["head_dim"]
    fields, keys = {}, [value_key]
    if "partial_rotary_factor" in family.defaults:
        width = width or _width_of_heads(values)
        numbers = all(type(each) is int and each > 0 for each in (rotated, width))
        fields["partial_rotary_factor"] = _share(rotated, width) if numbers else None
    else:
        width = width or rotated
        if values.get("position_embedding_type", True):
            keys.append(rotated_key)
    for key in keys:
        if _scalar(file, key, width) != width and width is not None:
            problem = f"{_scalar(file, key)!r} is not supported; a key has {width!r}"
            raise file.error(key, problem)
    return fields | {"head_dim": width}


def _share(part: int, whole: int) -> float:
    """Return the number that times `whole` is at least `part` after rounding."""
    share = part / whole
    return share if share * whole >= part else math.nextafter(share, math.inf)


def _window_pattern(file: Gguf, names: dict[str, str]) -> dict[str, Any]:
    """Return the fields with the layers that have a window: a flag for each, or an interval."""
    key = names["layer_types"] = names["sliding_window_pattern"]
    pattern = file.metadata.get(key)
    if not isinstance(pattern, np.ndarray | list):
        return {"sliding_window_pattern": pattern}
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[bool(flag)] for flag in pattern]}


def _recurrence_keys(family: Family) -> dict[str, str]:
    r = family.recurrence
    if r is None or not r.heads:
        return {}
    sizes = {r.heads: "time_step_rank", r.value_dim: "inner_size", r.key_heads: "group_count"}
    sizes |= {r.key_dim: "state_size", r.kernel: "conv_kernel"}
    return {field: f"ssm.{key}" for field, key in sizes.items()}


def _recurrence_values(
    file: Gguf, names: dict[str, str], family: Family, values: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of recurrent layers. Unless an interval says which layers these are, they
    are those without KV heads; a block without them may also be a feed-forward."""
    r = family.recurrence
    if r is None:
        return {}
    fields: dict[str, Any] = {r.conv_bias: _has(file, "ssm_conv1d.bias")} if r.conv_bias else {}
    if r.normed:
        fields[r.normed] = _has(file, "ssm_norm.weight")
    if family.experts is not None and family.experts.correction:
        fields[family.experts.correction] = _has(file, "exp_probs_b.bias")
    if r.heads:
        heads, inner = values[r.heads], values[r.value_dim]
        if type(heads) is not int or type(inner) is not int or heads < 1 or inner % heads:
            problem = f"{inner!r} is not a multiple of the number of heads, {heads!r}"
            raise file.error(names[r.value_dim], problem)
        fields[r.value_dim] = inner // heads
    by_layer = []
    for field in _MAY_BE_0:
        numbers, fields[field] = _by_layer(file, names[field], values["num_hidden_layers"])
        by_layer.append(numbers)
    fields = {field: value for field, value in fields.items() if value is not None}
    if family.blocks:
        kinds = zip(*by_layer, strict=True)
        blocks = ["attention" if kv else "mlp" if inner else "mamba" for kv, inner in kinds]
        return fields | {"layers_block_type": blocks}
    if "full_attention_interval" not in names and not family.joint:
        fields[r.types] = ["full_attention" if kv else r.kinds[0] for kv in by_layer[0]]
    return fields


def _by_layer(file: Gguf, key: str, layers: Any) -> tuple[list[Any], Any]:
    """Return the numbers of all layers, and the one number that is not 0."""
    given = file.metadata.get(key)
    if isinstance(given, np.ndarray) and len(given) == layers:
        return given.tolist(), _scalar(file, key, values=given[given != 0])
    value = _scalar(file, key)
    return [value] * layers if type(layers) is int else [], value


def _has(file: Gguf, name: str) -> bool:
    """Return whether a layer has a tensor of this name."""
    return any(each.startswith("blk.") and each.endswith(f".{name}") for each in file.tensors)


def _check_tokens(file: Gguf, config: ModelConfig, names: dict[str, str]) -> None:
    for name, ids in (("bos", [config.bos_token_id]), ("eos", config.eos_token_ids)):
        for token in ids:
            if token is not None and token >= config.vocab_size:
                problem = f"{token} is not a token of {config.vocab_size}"
                raise file.error(names[f"{name}_token_id"], problem)
    tokens = len(_array(file, "tokenizer.ggml.tokens"))
    if tokens > config.vocab_size:
        problem = f"{tokens} tokens, but {EMBEDDING} has {config.vocab_size} rows"
        raise file.error("tokenizer.ggml.tokens", problem)


def _scalar(file: Gguf, key: str, default: Any = None, values: Any = None) -> Any:
    """Return the value of a key for all layers. An array of equal values counts as that value.
    `values` are those that count."""
    value = file.metadata.get(key, default) if values is None else values
    if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
        return value[0].item()
    if isinstance(value, np.ndarray | list):
        raise file.error(key, f"an array of {len(value)} values; one for all layers is supported")
    if isinstance(value, str) and len(value) > _MAX_NAME_CHARS:
        raise file.error(key, f"{value[:_MAX_NAME_CHARS]!r} and more is not a name")
    return value


def _array(file: Gguf, key: str) -> Any:
    value = file.metadata.get(key, [])
    if not isinstance(value, np.ndarray | list):
        raise file.error(key, f"must be an array, got {value!r:.40}")
    return value


def _rope_scaling(file: Gguf, arch: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rope scaling in config.json's form; removes its fields from `values`."""
    prefix = "rope_scaling."
    scaling = {
        field.removeprefix(prefix): values.pop(field)
        for field in list(values)
        if field.startswith(prefix)
    }
    factor = scaling["factor"] or _scalar(file, f"{arch}.rope.scale_linear")
    scaling["factor"] = factor
    extra_factor = scaling["attention_factor"] or 1.0
    if SHORT_FACTORS in file.tensors:
        factors = file.tensors[SHORT_FACTORS].dequantised(torch.float32)
        scaling |= {"rope_type": "longrope", "attention_factor": extra_factor}
        return scaling | {"short_factor": factors.flatten().tolist()}
    kind = scaling["rope_type"] = scaling["rope_type"] or "linear"
    if kind == "none" or (kind == "linear" and not factor):
        return None
    cancelled = scaling.pop("mscale_all_dim") or 0.0
    numbers = all(isinstance(each, int | float) for each in (factor, extra_factor, cancelled))
    if kind == "yarn" and numbers and factor > 1:
        # GGUF has an additional factor, config.json the whole factor including length scaling.
        log = math.log(factor)
        scaling["attention_factor"] = extra_factor * (0.1 * log + 1) / (0.1 * cancelled * log + 1)
    return scaling


def _end_ids(file: Gguf) -> list[Any]:
    """Return the ids of EOS tokens: those named by the metadata, and control tokens with a known
    text."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [_scalar(file, key) for key in keys if key in file.metadata]
    tokens, types = (_array(file, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    control = [(i, tokens[i]) for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL]
    harmony = {text for _, text in control} >= HARMONY_END_TOKENS
    ends = HARMONY_END_TOKENS if harmony else END_TOKENS
    ids += [i for i, text in control if text in ends]
    return list(dict.fromkeys(ids))


def _dtype(file: Gguf) -> str:
    """Return the dtype of most values, or bfloat16 if these are quantised."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += math.prod(tensor.shape)
    most_common = counts.most_common(1)[0][0]
    return {"F32": "float32", "F16": "float16"}.get(most_common, "bfloat16")


def _with_factors(file: Gguf, config: ModelConfig) -> ModelConfig:
    """Return the config with the file's divisors in each rope; a layer may have none."""
    tensor, mixer = file.tensors[ROPE_FACTORS], config.attention
    pairs = mixer.rope.rotated(mixer.key_dim) // 2
    fits = tensor.shape == (pairs,)
    factors = tensor.dequantised(torch.float32) if fits else torch.zeros(1)
    if not (factors > 0).all():
        raise file.error(f"tensor {ROPE_FACTORS}", f"must hold {pairs} positive numbers")
    layers = []
    for layer in config.layers:
        m = layer.mixer
        if isinstance(m, Attention) and m.rope.type != "none":
            m = replace(m, rope=replace(m.rope, divisors=tuple(factors.tolist())))
        layers.append(replace(layer, mixer=m))
    return replace(config, layers=tuple(layers))
