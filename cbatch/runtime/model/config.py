"""What a checkpoint's `config.json` says, checked and in one spelling for every family. Of its
`generation_config.json` the EOS ids count beside."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cbatch.runtime.model.end_tokens import tokenizer_end_ids
from cbatch.runtime.model.quantisation import Quantisation, parse_quantisation

GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What transformers assumes where an older config.json is silent.
_DEFAULT_KV_HEADS = {"mistral": 8}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_MAX_WINDOW_LAYERS = 28
# More than any model has: who says so is damaged, or wants memory for nothing. Kernels count in 32
# bits, and keep a head on their stack.
_MOST = 1 << 30
_MOST_OF = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "head_dim": 1 << 12,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 18,
    "vocab_size": 1 << 20,
}
_MOST_NORM_EPS = 1.0
_LEAST_CONTEXT = 2  # tokens: a prompt's and one behind it
_LARGEST = float(2**127)  # of fp32


class ModelError(ValueError):
    """A checkpoint that cannot be served; the message names the file, the field and the remedy."""


class UnsupportedModelError(ModelError):
    """For what is whole, but nothing that our own pass computes."""


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding; fields beyond `theta` count only for the types that use them.

    `attention_factor` multiplies cos and sin (yarn); 1.0 elsewhere. `divisors` are what frequencies
    are divided by beside, one for each pair of dimensions, where a file has them.
    """

    type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_tokens: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


class KVShape(NamedTuple):
    """What a layer keeps of each token: of each of `heads` a key and a value."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def values(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class ModelConfig(msgspec.Struct, frozen=True):
    """Shape and arithmetic of a decoder. `sliding_window[layer]` is the window in tokens (the
    token itself included) or None for full attention; `max_position_tokens` is the context.
    `kv_shapes` are those of the layers where `num_kv_heads` and `head_dim` do not say all."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]
    tie_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str | None = None
    quantisation: Quantisation | None = None
    kv_shapes: tuple[KVShape, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class _Fields:
    """A JSON object whose every complaint names the file and the field, as `names` has it."""

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        prefix: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.values, self.prefix, self.names = path, values, prefix, names or {}

    def error(self, field: str, message: str, kind: type[ModelError] = ModelError) -> ModelError:
        name = f"{self.prefix}{field}"
        return kind(f"{self.path}: {self.names.get(name, name)}: {message}")

    def get(self, field: str, default: Any = None) -> Any:
        value = self.values.get(field)
        return default if value is None else value

    def integer(self, field: str, default: int | None = None, least: int = 1) -> int:
        """A positive integer; `default` where it is absent or null, an error if there is none."""
        value, most = self.get(field, default), _MOST_OF.get(field, _MOST)
        if value is None:
            raise self.error(field, "missing; a complete file of the model has it")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least else "an integer of 0 or more"
            raise self.error(field, f"must be {kind}, got {value!r:.40}")
        if value > most:
            raise self.error(field, f"must be at most {most}, got {value!r:.40}")
        return value

    def number(self, field: str, default: float | None = None, most: float = math.inf) -> float:
        """A positive finite number; `default` as in `integer`."""
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "missing; a complete file of the model has it")
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value <= min(most, _LARGEST):
            limit = "" if most == math.inf else f" of at most {most:g}"
            raise self.error(field, f"must be a positive number{limit}, got {value!r:.40}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r:.40}")
        return value


def is_hub_name(name: str) -> bool:
    """Whether it has the form `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def load_config(path: str | Path) -> ModelConfig:
    """Read `config.json` (a file, or the directory that holds it).

    Raises ModelError, naming file and field, for what is missing, malformed or not supported.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        raise ModelError(
            f"{file}: not found; give a Hugging Face model directory (config.json, *.safetensors)"
        )
    config = parse_config(read_json_object(file), file)
    return msgspec.structs.replace(config, eos_token_ids=eos_ids_of(file.parent))


def eos_ids_of(directory: Path) -> tuple[int, ...]:
    """By config, generation config and the tokenizer's files, each once. Raises ModelError for what
    is no token id."""
    found: list[int] = []
    for file in (directory / "config.json", directory / GENERATION_FILE):
        found += _token_ids(_Fields(file, read_optional(file)), "eos_token_id")
    configs = [read_optional(directory / name) for name in _TOKENIZER_FILES]
    named = tokenizer_end_ids(configs, directory / "tokenizer.json", guess=not found)
    found += [token_id for token_id in named if 0 <= token_id <= _MOST]
    return tuple(dict.fromkeys(found))


def read_optional(file: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises ModelError for one that cannot be read."""
    return read_json_object(file) if file.exists() else {}


def require_file(file: Path) -> None:
    """Raise ModelError for a pipe, a device or a folder: to read one may never end."""
    if file.exists() and not file.is_file():
        raise ModelError(f"{file}: is no regular file; give the model's own")


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises ModelError for a file that holds no JSON object."""
    require_file(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(f"{file}: cannot be read as JSON ({err})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: must hold a JSON object, got {type(values).__name__}")
    return values


def parse_config(
    values: Mapping[str, Any], path: Path, names: Mapping[str, str] | None = None
) -> ModelConfig:
    """`load_config` on values already read; `path` is for messages only, and so is `names`: what
    the fields are called in a file of another format."""
    f = _Fields(path, values, names=names)
    family = _family(f)
    _refuse_unsupported(f)
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", _default_kv_heads(f, family, heads))
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    head_dim = f.integer("head_dim", _DEFAULT_HEAD_DIM.get(family, hidden // heads))
    if head_dim % 2:
        raise f.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    layers, position_tokens = f.integer("num_hidden_layers"), f.integer("max_position_embeddings")
    rope = _rope(f, position_tokens)
    attention_bias = f.flag("attention_bias", False) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=f.integer("intermediate_size"),
        max_position_tokens=_context_tokens(f, rope, position_tokens),
        rms_norm_eps=f.number("rms_norm_eps", _DEFAULT_NORM_EPS, _MOST_NORM_EPS),
        rope=rope,
        sliding_window=_sliding_window(f, family, layers),
        tie_embeddings=f.flag("tie_word_embeddings", False),
        attention_bias=attention_bias or family == "qwen2",
        attention_out_bias=attention_bias,
        mlp_bias=f.flag("mlp_bias", False) and family == "llama",
        qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(f, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(f, "bos_token_id")), None),
        torch_dtype=_dtype(f),
        quantisation=parse_quantisation(f.get("quantization_config"), f.error),
    )


def _dtype(f: _Fields) -> str | None:
    field = "torch_dtype" if f.get("dtype") is None else "dtype"
    value = f.get(field)
    if value is not None and not isinstance(value, str):
        raise f.error(field, f"must be the name of a type, got {value!r:.40}")
    return value


def _default_kv_heads(f: _Fields, family: str, heads: int) -> int:
    absent = "num_key_value_heads" not in f.values
    return _DEFAULT_KV_HEADS.get(family, heads) if absent else heads


def _family(f: _Fields) -> str:
    names = f.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise f.error("architectures", f"must be a list of names, got {names!r:.80}")
    model_type = f.get("model_type")
    if not names and model_type in _FAMILIES.values():
        return str(model_type)
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    got = ", ".join(names) or f"model_type {model_type!r}"
    problem = f"{got:.80} is not supported; supported: {', '.join(_FAMILIES)}"
    raise f.error("architectures", problem, UnsupportedModelError)


def _refuse_unsupported(f: _Fields) -> None:
    experts = f.get("num_experts", f.get("num_local_experts"))
    if experts is not None:
        problem = "mixtures of experts are not supported; use a dense model"
        raise f.error("num_experts", problem, UnsupportedModelError)
    act = f.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        problem = f"{act!r:.40} is not supported; supported: silu"
        raise f.error("hidden_act", problem, UnsupportedModelError)


def _sliding_window(f: _Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """Window of each layer, by the rules of the family's transformers class."""
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        absent = "sliding_window" not in f.values
        if not absent and f.values["sliding_window"] is None:
            return (None,) * layers
        return (f.integer("sliding_window", _DEFAULT_SLIDING_WINDOW["mistral"]),) * layers
    if not f.flag("use_sliding_window", False):
        return (None,) * layers
    window = f.integer("sliding_window", _DEFAULT_SLIDING_WINDOW[family])
    types = f.get("layer_types")
    if types is None:
        first = f.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    names = {"sliding_attention": window, "full_attention": None}
    named = isinstance(types, list) and all(isinstance(t, str) and t in names for t in types)
    if not named or len(types) != layers:
        known = ", ".join(names)
        problem = f"must name {layers} layers, each one of {known}; got {types!r:.80}"
        raise f.error("layer_types", problem)
    return tuple(names[t] for t in types)


def _token_ids(f: _Fields, field: str) -> tuple[int, ...]:
    value = f.get(field)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _MOST for i in ids):
        raise f.error(field, f"must be a token id or a list of them, got {value!r:.40}")
    return ids


def _context_tokens(f: _Fields, rope: RopeConfig, position_tokens: int) -> int:
    """Configurations disagree whether `max_position_embeddings` is the length before or after it is
    stretched. As vLLM: yarn says itself what is stretched, with linear it is taken for the one
    before, with llama3 for the one after."""
    if rope.type == "yarn":
        position_tokens = rope.original_max_position_tokens
    found = position_tokens * (rope.factor if rope.type in ("linear", "yarn") else 1)
    if not _LEAST_CONTEXT <= found <= _MOST:
        problem = f"a context of {found:.6g} tokens; {_LEAST_CONTEXT} to {_MOST} are supported"
        raise f.error("max_position_embeddings", problem)
    return round(found)


def _rope(f: _Fields, context_tokens: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`."""
    field = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    raw = f.get(field, {})
    if not isinstance(raw, dict):
        raise f.error(field, f"must be an object, got {raw!r:.40}")
    r = _Fields(f.path, raw, f"{field}.", f.names)
    kind = r.get("rope_type", r.get("type", "default"))
    if kind not in _ROPE_TYPES:
        problem = f"{kind!r:.40} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        raise r.error("rope_type", problem, UnsupportedModelError)
    if r.get("partial_rotary_factor", f.get("partial_rotary_factor", 1.0)) != 1.0:
        raise r.error("partial_rotary_factor", "only 1.0 is supported", UnsupportedModelError)
    theta = r.number("rope_theta", f.number("rope_theta", _DEFAULT_ROPE_THETA))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "yarn" and theta == 1:
        raise f.error("rope_theta", "must not be 1 where yarn stretches it")
    original = r.get("original_max_position_embeddings")
    if original is None:
        original = f.integer("original_max_position_embeddings", context_tokens)
    else:
        original = r.integer("original_max_position_embeddings")
    default_factor = context_tokens / original if kind == "yarn" else None
    factor = r.number("factor", default_factor)
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=factor)
    if kind == "llama3":
        return RopeConfig(
            type=kind,
            theta=theta,
            factor=factor,
            low_freq_factor=r.number("low_freq_factor"),
            high_freq_factor=r.number("high_freq_factor"),
            original_max_position_tokens=original,
        )
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_position_tokens=original,
        attention_factor=_yarn_attention_factor(r, factor),
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        truncate=r.flag("truncate", True),
    )


def _yarn_attention_factor(r: _Fields, factor: float) -> float:
    """Given, or 0.1 mscale ln(factor) + 1 (YaRN, eq. 22, arXiv:2309.00071)."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if r.get("attention_factor") is not None:
        return r.number("attention_factor")
    if r.get("mscale") and r.get("mscale_all_dim"):
        return scale(r.number("mscale")) / scale(r.number("mscale_all_dim"))
    return scale(1.0)
