"""Parsing of `config.json`, for every family that our own forward pass computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cbatch.runtime.model.config import (
    Arithmetic,
    Experts,
    Fields,
    ModelConfig,
    ModelError,
    RopeConfig,
    UnsupportedModelError,
    eos_ids_of,
    read_json_object,
    token_ids,
)
from cbatch.runtime.model.families import Family, families
from cbatch.runtime.model.quantisation import parse_quantisation

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu2": "relu_squared"}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# One norm, before both attention and the feed-forward; see `Arithmetic.norms`.
_SHARED_NORM = ("input_layernorm", None, "input_layernorm", None)
_DEFAULT_NORM_EPS = 1e-6
_MAX_NORM_EPS = 1.0
# Context limits in tokens: one of a prompt and one generated; positions fit 32-bit integers.
_MIN_CONTEXT, _MAX_CONTEXT = 2, 1 << 30


def load_config(path: str | Path) -> ModelConfig:
    """Read `config.json` (a file, or the directory that holds it).

    Raises ModelError, naming file and field, for anything missing, malformed or not supported.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        raise ModelError(
            f"{file}: not found; give a Hugging Face model directory (config.json, *.safetensors)"
        )
    config = parse_config(read_json_object(file), file)
    return replace(config, eos_token_ids=eos_ids_of(file.parent))


def parse_config(
    values: Mapping[str, Any], path: Path, names: Mapping[str, str] | None = None
) -> ModelConfig:
    """Return the configuration that the JSON object `values` describes. Errors name `path` and the
    field; `names` maps field names to those of a file in another format. Raises ModelError as
    `load_config` does."""
    family = _family(Fields(path, values, names=names))
    # A default of false in families.toml removes an inherited default.
    defaults = {field: value for field, value in family.defaults.items() if value is not False}
    f = Fields(path, {**defaults, **values}, names=names)
    _refuse_unsupported(f, family)
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    head_dim = f.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise f.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    layers = f.integer("num_hidden_layers")
    types = _layer_types(f, family, layers)
    windows = _windows(f, family, layers, types)
    rope, layer_ropes = _ropes(f, family, windows, types, head_dim)
    return ModelConfig(
        family=family.name,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=f.integer("intermediate_size"),
        max_position_tokens=_context_tokens(f, family, rope),
        rms_norm_eps=f.number(family.eps, _DEFAULT_NORM_EPS, _MAX_NORM_EPS),
        rope=rope,
        sliding_window=windows,
        tie_embeddings=f.flag("tie_word_embeddings", False),
        attention_bias=_bias(f, family.qkv_bias),
        attention_out_bias=_bias(f, family.out_bias),
        mlp_bias=_bias(f, family.mlp_bias),
        qk_norm=family.qk_norm,
        eos_token_ids=token_ids(f, "eos_token_id"),
        bos_token_id=next(iter(token_ids(f, "bos_token_id")), None),
        torch_dtype=_dtype(f),
        quantisation=parse_quantisation(f.get("quantization_config"), f.error),
        arithmetic=_arithmetic(f, family, layer_ropes),
    )


def _arithmetic(f: Fields, family: Family, layer_ropes: tuple[RopeConfig, ...]) -> Arithmetic:
    options = dict(family.flags)
    if options.get("parallel"):
        options["norms"] = _SHARED_NORM
    if "norms" in options:
        options["norms"] = tuple(name or None for name in options["norms"])
    for name, (field, power) in family.numbers.items():
        if f.get(field) is not None:
            options[name] = f.number(field) ** power
    experts = _experts(f, family)
    act = _activation(f, family)
    return Arithmetic(activation=act, experts=experts, layer_ropes=layer_ropes, **options)


def _activation(f: Fields, family: Family) -> str:
    if family.experts is not None and family.experts.clamped:
        return "clamped"
    field = "hidden_act" if f.get("hidden_activation") is None else "hidden_activation"
    act = f.get(field, "silu")
    if act == "gelu" and "gemma" in family.name:  # older files name the wrong activation
        act = "gelu_pytorch_tanh"
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        problem = f"{act!r:.40} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        raise f.error(field, problem, UnsupportedModelError)
    return _ACTIVATIONS[act]


def _experts(f: Fields, family: Family) -> Experts | None:
    fields = family.experts
    if fields is None:
        return None
    count = f.integer("num_local_experts" if f.get("num_experts") is None else "num_experts")
    chosen, width = f.integer("num_experts_per_tok"), f.integer(fields.width)
    if chosen > count:
        raise f.error(
            "num_experts_per_tok", f"must be at most the {count} experts of a layer, got {chosen}"
        )
    shared_width = f.integer(fields.shared, least=0) if fields.shared else 0
    if shared_width % width:
        problem = f"must be a multiple of the width of an expert, {width}; got {shared_width}"
        raise f.error(fields.shared, problem, UnsupportedModelError)
    interval = f.integer("decoder_sparse_step", 1)
    dense_layers = f.get("mlp_only_layers", [])
    layers = range(f.integer("num_hidden_layers"))
    return Experts(
        count=count,
        chosen=chosen,
        width=width,
        normalized=fields.normalized or f.flag("norm_topk_prob", False),
        shared=shared_width // width,
        dense_layers=tuple(i for i in layers if i in dense_layers or (i + 1) % interval),
        limit=f.number("swiglu_limit") if fields.clamped else 0.0,
        alpha=f.number("swiglu_alpha") if fields.clamped else 0.0,
    )


def _bias(f: Fields, field: bool | str) -> bool:
    return f.flag(field, False) if isinstance(field, str) else field


def _dtype(f: Fields) -> str | None:
    field = "torch_dtype" if f.get("dtype") is None else "dtype"
    value = f.get(field)
    if value is not None and not isinstance(value, str):
        raise f.error(field, f"must be the name of a type, got {value!r:.40}")
    return value


def _family(f: Fields) -> Family:
    known = families()
    names = f.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise f.error("architectures", f"must be a list of names, got {names!r:.80}")
    model_type = f.get("model_type")
    if not names:
        names = [name for name, family in known.items() if family.name == model_type]
    for name in names:
        if name in known:
            return known[name]
    got = ", ".join(names) or f"model_type {model_type!r}"
    problem = f"{got:.80} is not supported; supported: {', '.join(known)}"
    raise f.error("architectures", problem, UnsupportedModelError)


def _refuse_unsupported(f: Fields, family: Family) -> None:
    experts = f.get("num_experts", f.get("num_local_experts"))
    if experts is not None and family.experts is None:
        problem = f"mixtures of experts are not supported in {family.name}; use a dense model"
        raise f.error("num_experts", problem, UnsupportedModelError)
    needs_plain_weights = (
        family.names or family.fused or family.experts or family.flags.get("norm_bias")
    )
    if needs_plain_weights and f.get("quantization_config") is not None:
        problem = f"{family.name} is supported with unquantised weights only"
        raise f.error("quantization_config", problem, UnsupportedModelError)
    for field in family.unsupported:
        if f.get(field, False) is not False:
            problem = f"{f.get(field)!r:.40} is not supported"
            raise f.error(field, problem, UnsupportedModelError)


def _layer_types(f: Fields, family: Family, layers: int) -> list[str] | None:
    if family.windows not in ("typed", "late"):
        return None
    types = f.get("layer_types")
    if types is None:
        if family.windows == "late":
            first = f.integer("max_window_layers", least=0)
            is_sliding = [i >= first for i in range(layers)]
        else:
            interval = f.integer("sliding_window_pattern", family.full_every, least=0)
            is_sliding = [not interval or bool((i + 1) % interval) for i in range(layers)]
        return ["sliding_attention" if each else "full_attention" for each in is_sliding]
    known = ("sliding_attention", "full_attention")
    valid = isinstance(types, list) and all(isinstance(t, str) and t in known for t in types)
    if not valid or len(types) != layers:
        problem = f"must name {layers} layers, each one of {', '.join(known)}; got {types!r:.80}"
        raise f.error("layer_types", problem)
    layer_types: list[str] = types
    return layer_types


def _windows(
    f: Fields, family: Family, layers: int, types: list[str] | None
) -> tuple[int | None, ...]:
    """Return each layer's window, by the rules of the family's transformers class."""
    windows_off = "use_sliding_window" in family.defaults and not f.flag(
        "use_sliding_window", False
    )
    if family.windows == "none" or windows_off or f.get("sliding_window") is None:
        return (None,) * layers
    window = f.integer("sliding_window")
    return tuple(
        window if types is None or types[i] == "sliding_attention" else None for i in range(layers)
    )


def _context_tokens(f: Fields, family: Family, rope: RopeConfig) -> int:
    """Return the longest context. As in vLLM, it depends on the type of the rope:

    - linear: `max_position_embeddings` is the length before scaling, times the factor;
    - yarn: the original length, a field of the rope, times the factor;
    - longrope: the original length; longer contexts need other frequencies, which are unsupported;
    - others: `max_position_embeddings` itself.

    With a rope for each type of layer (`typed`), nothing is multiplied.
    """
    context: float = f.integer("max_position_embeddings")
    if rope.type in ("yarn", "longrope"):
        context = rope.original_max_position_tokens
    if rope.type in ("linear", "yarn") and family.ropes != "typed":
        context *= rope.factor
    if not _MIN_CONTEXT <= context <= _MAX_CONTEXT:
        problem = (
            f"a context of {context:.6g} tokens; {_MIN_CONTEXT} to {_MAX_CONTEXT} are supported"
        )
        raise f.error("max_position_embeddings", problem)
    return round(context)


def _ropes(
    f: Fields,
    family: Family,
    windows: tuple[int | None, ...],
    types: list[str] | None,
    head_dim: int,
) -> tuple[RopeConfig, tuple[RopeConfig, ...]]:
    if types is not None and family.ropes == "typed":
        nested = f.get("rope_parameters", {})
        if not isinstance(nested, dict):
            raise f.error("rope_parameters", f"must be an object, got {nested!r:.40}")
        local_theta = f.get("rope_local_base_freq", f.get("rope_theta"))
        by_type = {}
        for kind, overrides in (
            ("full_attention", {}),
            ("sliding_attention", {"rope_theta": local_theta, "rope_scaling": None}),
        ):
            values = {**f.values, **overrides, "rope_parameters": nested.get(kind)}
            by_type[kind] = _rope(Fields(f.path, values, names=f.names), family, head_dim)
        return by_type["full_attention"], tuple(by_type[kind] for kind in types)
    rope = _rope(f, family, head_dim)
    no_rope = replace(rope, share=0.0)
    if family.ropes == "windowed" and any(windows):
        return rope, tuple(no_rope if window is None else rope for window in windows)
    if family.ropes == "listed":
        layers, interval = len(windows), f.integer("no_rope_layer_interval")
        # 1 for a layer with a rope, despite the name of the field.
        flags = f.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
        if not isinstance(flags, list) or len(flags) != layers:
            raise f.error("no_rope_layers", f"must have {layers} numbers, got {flags!r:.40}")
        return rope, tuple(rope if each else no_rope for each in flags)
    return rope, ()


def _rope(f: Fields, family: Family, head_dim: int) -> RopeConfig:
    """Parse the fields of a rope: `rope_parameters` (transformers 5), or `rope_theta` with
    `rope_scaling` (earlier)."""
    context_tokens = f.integer("max_position_embeddings")
    field = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    raw = f.get(field, {})
    if not isinstance(raw, dict):
        raise f.error(field, f"must be an object, got {raw!r:.40}")
    r = Fields(f.path, raw, f"{field}.", f.names)
    kind = r.get("rope_type", r.get("type", "default"))
    if kind not in _ROPE_TYPES:
        problem = f"{kind!r:.40} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        raise r.error("rope_type", problem, UnsupportedModelError)
    share = r.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0), 1.0)
    if share != 1.0 and "partial_rotary_factor" not in family.defaults:
        raise r.error("partial_rotary_factor", "only 1.0 is supported", UnsupportedModelError)
    theta = r.number("rope_theta", f.number("rope_theta", RopeConfig().theta))
    plain = RopeConfig(theta=theta, share=share, interleaved=family.interleaved)
    if plain.rotated(head_dim) % 2:
        rotated = plain.rotated(head_dim)
        problem = f"must rotate an even number of dimensions; {share!r} of {head_dim} is {rotated}"
        raise r.error("partial_rotary_factor", problem)
    if kind == "default":
        return plain
    if kind == "yarn" and theta == 1:
        raise f.error("rope_theta", "must not be 1 with yarn")
    field = "original_max_position_embeddings"
    source = f if r.get(field) is None or field in family.defaults else r
    original = source.integer(field, context_tokens)
    default_factor = context_tokens / original if kind in ("yarn", "longrope") else None
    factor = r.number("factor", default_factor)
    if kind == "linear":
        return replace(plain, type=kind, factor=factor)
    if kind == "longrope":
        return _longrope(r, plain, original, factor, plain.rotated(head_dim) // 2)
    if kind == "llama3":
        return replace(
            plain,
            type=kind,
            factor=factor,
            low_freq_factor=r.number("low_freq_factor"),
            high_freq_factor=r.number("high_freq_factor"),
            original_max_position_tokens=original,
        )
    return replace(
        plain,
        type=kind,
        factor=factor,
        original_max_position_tokens=original,
        attention_factor=_yarn_attention_factor(r, factor),
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        truncate=r.flag("truncate", True),
    )


def _longrope(r: Fields, plain: RopeConfig, original: int, factor: float, pairs: int) -> RopeConfig:
    """Return LongRoPE (arXiv:2402.13753) with the divisors in `short_factor`, which are for
    contexts up to the original length. Longer contexts would need those in `long_factor`."""
    divisors = r.get("short_factor")
    valid = isinstance(divisors, list) and all(
        isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < math.inf
        for n in divisors
    )
    if not valid or len(divisors) != pairs:
        raise r.error("short_factor", f"must be {pairs} positive numbers, got {divisors!r:.40}")
    scale = 1.0
    if factor > 1 and original > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        plain,
        type="longrope",
        original_max_position_tokens=original,
        attention_factor=r.number("attention_factor", scale),
        divisors=tuple(map(float, divisors)),
    )


def _yarn_attention_factor(r: Fields, factor: float) -> float:
    """Return the field `attention_factor`, or 0.1 mscale ln(factor) + 1 (YaRN, eq. 22,
    arXiv:2309.00071), divided by the same with `mscale_all_dim` if both fields are set."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if r.get("attention_factor") is not None:
        return r.number("attention_factor")
    if r.get("mscale") and r.get("mscale_all_dim"):
        return scale(r.number("mscale")) / scale(r.number("mscale_all_dim"))
    return scale(1.0)
