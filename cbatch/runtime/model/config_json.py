"""Parsing of `config.json`, for every family that our own forward pass computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cbatch.runtime.model.config import (
    Fields,
    ModelConfig,
    ModelError,
    UnsupportedModelError,
    eos_ids_of,
    read_json_object,
    token_ids,
)
from cbatch.runtime.model.families import ExpertFields, Family, families
from cbatch.runtime.model.layers_json import vary_layers
from cbatch.runtime.model.quantisation import parse_quantisation
from cbatch.runtime.model.records import (
    Activation,
    Attention,
    Experts,
    FeedForward,
    LayerInputs,
    LayerRecord,
    Norm,
    Rope,
)
from cbatch.runtime.model.recurrence_json import join_blocks, parse_recurrence
from cbatch.runtime.model.rope_json import parse_ropes

_ACTIVATIONS: dict[str, Activation]
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu2": "relu_squared", "xielu": "xielu"}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_DEFAULT_NORM_EPS = 1e-6
_MAX_NORM_EPS = 1.0
_SCAN_PARTS = 5  # of the first projection: gate, values, keys, queries, steps
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
    values: Mapping[str, Any],
    path: Path,
    names: Mapping[str, str] | None = None,
    family: Family | None = None,
) -> ModelConfig:
    """Return the configuration that the JSON object `values` describes. Errors name `path` and the
    field; `names` maps field names to those of a file in another format. `family` is the one that
    `values` name, unless given. Raises ModelError as `load_config` does."""
    values = _text_values(Fields(path, values, names=names))
    family = family or _family(Fields(path, values, names=names))
    # A default of false in families.toml removes an inherited default.
    defaults = {field: value for field, value in family.defaults.items() if value is not False}
    f = Fields(path, {**defaults, **values}, names=names)
    if family.blocks:
        f = Fields(path, {**f.values, **join_blocks(f)}, names=names)
    _refuse_unsupported(f, family)
    numbers = {
        name: f.number(field) ** power
        for name, (field, power) in family.numbers.items()
        if f.get(field) is not None
    }
    norm = Norm("norm", f.number(family.eps, _DEFAULT_NORM_EPS, _MAX_NORM_EPS), **family.norm)
    mixer = _attention(f, family, norm, numbers)
    types = _layer_types(f, family, f.integer("num_hidden_layers"))
    windows = _windows(f, family, f.integer("num_hidden_layers"), types)
    main_rope, ropes = parse_ropes(f, family, windows, types, mixer.key_dim)
    feed_forwards = _feed_forwards(f, family, norm, numbers)
    recurrences = parse_recurrence(f, family, _branch(family.norms[:2], norm, numbers))
    rows = zip(ropes, windows, feed_forwards, recurrences, strict=True)
    layers: list[LayerRecord] = []
    for rope, window, feed_forward, recurrence in rows:
        attention = replace(mixer, rope=rope, window=window)
        if family.joint:
            layers.append(LayerRecord(attention, None))
        mixed = recurrence or attention
        layers.append(LayerRecord(mixed, feed_forward, family.parallel, family.joint))
    inputs: LayerInputs | None = None
    if family.varied and types is not None:
        layers, inputs = vary_layers(f, layers, types, norm)
    return ModelConfig(
        family=family.name,
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        max_position_tokens=_context_tokens(f, family, main_rope),
        layers=tuple(layers),
        norm=norm,
        tie_embeddings=f.flag("tie_embedding", f.flag("tie_word_embeddings", False)),
        embedding_scale=numbers.get("embedding_scale", 1.0),
        head_bias=family.head_bias,
        logit_scale=numbers.get("logit_scale", 1.0),
        logit_softcap=numbers.get("logit_softcap", 0.0),
        layer_inputs=inputs,
        eos_token_ids=token_ids(f, "eos_token_id"),
        bos_token_id=next(iter(token_ids(f, "bos_token_id")), None),
        torch_dtype=_dtype(f),
        quantisation=parse_quantisation(f.get("quantization_config"), f.error),
        scales=tuple((name, _factors(f, fields)) for name, fields in family.scales.items()),
    )


def _factors(f: Fields, fields: Sequence[str]) -> tuple[float, ...]:
    """Return the product of some fields, by parts if one is a list."""
    factors = [1.0]
    for name in fields:
        field, _, index = name.partition(".")
        given = f.get(field)
        if given is not None:
            values = given if isinstance(given, list) else [given]
            if isinstance(given, list) and len(given) != (2 if index else _SCAN_PARTS):
                raise f.error(field, f"{given!r:.60} has another length than the family's")
            parts = Fields(f.path, {str(i): each for i, each in enumerate(values)}, f"{field}.")
            numbers = [parts.number(index or str(i)) for i in range(1 if index else len(values))]
            factors = [a * b for a in factors for b in numbers]
    return tuple(factors)


def _text_values(f: Fields) -> Mapping[str, Any]:
    """Return the fields of the language model, if the architecture wraps one that we support."""
    for architecture, family in families().items():
        if any(name in family.wrappers for name in _architectures(f)):
            values = f.get("text_config", {})
            if not isinstance(values, dict):
                raise f.error("text_config", f"must be an object, got {values!r:.40}")
            return {**f.values, **values, "architectures": [architecture]}
    return f.values


def _architectures(f: Fields) -> list[str]:
    names = f.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise f.error("architectures", f"must be a list of names, got {names!r:.80}")
    return names


def _attention(f: Fields, family: Family, norm: Norm, numbers: dict[str, float]) -> Attention:
    """Return the attention of a layer, without rope and window."""
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    head_dim = f.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise f.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return Attention(
        **_branch(family.norms[:2], norm, numbers),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        scale=numbers.get("attention_scale", head_dim**-0.5),
        soft_cap=numbers.get("attention_softcap", 0.0),
        bias=_bias(f, family.qkv_bias),
        out_bias=_bias(f, family.out_bias),
        qk_norm=Norm("norm", norm.eps, offset=norm.offset) if family.qk_norm else None,
        norms_whole=family.qk_norm == "whole",
        norms_rotated=family.qk_norm == "rotated",
        sinks=family.sinks,
        gate=family.gate,
    )


def _branch(names: Sequence[str], norm: Norm, numbers: dict[str, float]) -> dict[str, Any]:
    """Return the fields of a `Branch` whose norms, before and after it, have these names."""
    before, after = (replace(norm, name=name) if name else None for name in names)
    scale = numbers.get("residual_scale", 1.0)
    return {"norm": before, "out_norm": after, "out_scale": scale}


def _feed_forwards(
    f: Fields, family: Family, norm: Norm, numbers: dict[str, float]
) -> list[FeedForward | Experts | None]:
    """Return the feed-forward of each layer; None for a layer without one."""
    names = (family.norms[0], "") if family.parallel else family.norms[2:]
    branch, activation = _branch(names, norm, numbers), _activation(f, family)
    dense = FeedForward(
        **branch,
        inner=_inner(f, family),
        activation=activation,
        gated=family.gated,
        bias=_bias(f, family.mlp_bias),
    )
    layers = range(f.integer("num_hidden_layers"))
    without = f.get("without_forward", []) if family.blocks else []
    if family.experts is None or not _has_experts(f, family):
        return [None if i in without else dense for i in layers]
    experts = _experts(f, family.experts, branch, activation)
    interval = f.integer("decoder_sparse_step", 1)
    dense_layers = f.get("mlp_only_layers", [])
    if family.experts.dense:
        dense_layers = [*range(min(f.integer(family.experts.dense, least=0), len(layers)))]
    listed = dense_layers if isinstance(dense_layers, list) else [None]
    if not all(type(each) is int and each in layers for each in listed):
        problem = f"must be a list of layers, 0 to {len(layers) - 1}; got {dense_layers!r:.40}"
        raise f.error("mlp_only_layers", problem)
    return [
        None if i in without else dense if i in dense_layers or (i + 1) % interval else experts
        for i in layers
    ]


def _has_experts(f: Fields, family: Family) -> bool:
    if family.experts is None:
        return False
    return family.experts.shared_gate or f.integer("num_local_experts", least=0) > 0


def _inner(f: Fields, family: Family) -> int:
    """Return the inner width of a dense feed-forward, by LFM2's rule if it applies."""
    if family.experts is not None and not family.experts.shared_gate:
        return f.integer(family.experts.shared)
    inner = f.integer("intermediate_size" if f.get("block_ff_dim") is None else "block_ff_dim")
    if f.flag("block_auto_adjust_ff_dim", False):
        multiple = f.integer("block_multiple_of")
        inner = int(f.number("block_ffn_dim_multiplier") * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return inner


def _activation(f: Fields, family: Family) -> Activation:
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


def _experts(
    f: Fields, fields: ExpertFields, branch: dict[str, Any], activation: Activation
) -> Experts:
    count = f.integer("num_local_experts" if f.get("num_experts") is None else "num_experts")
    chosen, width = f.integer("num_experts_per_tok"), f.integer(fields.width)
    if chosen > count:
        raise f.error(
            "num_experts_per_tok", f"must be at most the {count} experts of a layer, got {chosen}"
        )
    shared_width = f.integer(fields.shared, least=0) if fields.shared else 0
    if shared_width % width and fields.shared_gate:
        problem = f"must be a multiple of the width of an expert, {width}; got {shared_width}"
        raise f.error(fields.shared, problem, UnsupportedModelError)
    return Experts(
        **branch,
        count=count,
        chosen=chosen,
        inner=width,
        activation=activation,
        normalized=fields.normalized or f.flag("norm_topk_prob", False),
        shared=-(-shared_width // width),
        shared_inner=shared_width,
        shared_gate=fields.shared_gate,
        sigmoid=bool(fields.correction),
        corrected=bool(fields.correction) and f.flag(fields.correction, False),
        scale=f.number("routed_scaling_factor", 1.0) if fields.correction else 1.0,
        bias=fields.clamped,
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
    names = _architectures(f)
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
    given = f.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if family.stacked == "inputs" or method == "mxfp4":
        needs_plain_weights = family.stacked != "inputs" or method != "mxfp4"
    else:
        needs_plain_weights = bool(family.stacked or family.fused or family.scales or family.varied)
        needs_plain_weights |= bool(family.norm.get("has_bias"))
    if needs_plain_weights and given is not None:
        problem = f"{family.name} is supported with unquantised weights only"
        raise f.error("quantization_config", problem, UnsupportedModelError)
    for field in family.unsupported:
        # Prompts are text: that images see later tokens has no effect.
        allowed = "vision" if field == "use_bidirectional_attention" else False
        if (value := f.get(field, False)) not in (False, allowed):
            raise f.error(field, f"{value!r:.40} is not supported", UnsupportedModelError)


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
        types = ["sliding_attention" if each else "full_attention" for each in is_sliding]
        return _last_full(types, family)
    known = ("sliding_attention", "full_attention")
    valid = isinstance(types, list) and all(isinstance(t, str) and t in known for t in types)
    if not valid or len(types) != layers:
        problem = f"must name {layers} layers, each one of {', '.join(known)}; got {types!r:.80}"
        raise f.error("layer_types", problem)
    layer_types: list[str] = types
    return _last_full(layer_types, family)


def _last_full(types: list[str], family: Family) -> list[str]:
    """Return the types with a full last layer where transformers takes it for one."""
    return [*types[:-1], "full_attention"] if family.varied else types


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


def _context_tokens(f: Fields, family: Family, rope: Rope) -> int:
    """Return the longest context. As in vLLM, it depends on the type of the rope:

    - linear: `max_position_embeddings` is the length before scaling, times the factor;
    - yarn: the original length, a field of the rope, times the factor;
    - longrope: the original length; longer contexts need other frequencies, which are unsupported;
    - yarn with `llama_4_scaling_beta`: the original length; longer contexts need scaled queries;
    - others: `max_position_embeddings` itself.

    With a rope for each type of layer (`typed`), nothing is multiplied.
    """
    context: float = f.integer("max_position_embeddings")
    if rope.type in ("yarn", "longrope"):
        context = rope.original_max_position_tokens
    scaling = f.get("rope_scaling") or f.get("rope_parameters")
    scales_queries = rope.type == "yarn" and scaling.get("llama_4_scaling_beta")
    if rope.type in ("linear", "yarn") and family.ropes != "typed" and not scales_queries:
        context *= rope.factor
    if not _MIN_CONTEXT <= context <= _MAX_CONTEXT:
        problem = (
            f"a context of {context:.6g} tokens; {_MIN_CONTEXT} to {_MAX_CONTEXT} are supported"
        )
        raise f.error("max_position_embeddings", problem)
    return round(context)
