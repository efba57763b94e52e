"""Shape and arithmetic of a model, in one form for every family; validated access to JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cbatch.core.request.errors import InputError
from cbatch.runtime.model.end_tokens import tokenizer_end_ids
from cbatch.runtime.model.quantisation import Quantisation

GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Upper limits of config fields, above the values of any model. A larger value means a damaged file,
# or would waste memory. Below the limits no kernel's 32-bit count overflows, and an attention head
# fits on the stack.
_MAX_INT = 1 << 30
_MAX_OF = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "head_dim": 1 << 12,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 18,
    "vocab_size": 1 << 20,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "moe_intermediate_size": 1 << 18,
    "shared_expert_intermediate_size": 1 << 18,
}
_MAX_FLOAT = float(2**127)  # power of two below the largest fp32 number


class ModelError(InputError):
    """A checkpoint that cannot be served; the message names the file, the field and the remedy."""


class UnsupportedModelError(ModelError):
    """A valid checkpoint that our own pass cannot compute."""


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding. Each type ignores the fields that it does not use.

    `attention_factor` multiplies cos and sin (yarn, longrope); it is 1.0 elsewhere. `divisors`, one
    for each pair of dimensions, divide the frequencies. The first `share` of a head's dimensions
    rotate. With `interleaved`, the dimensions of a pair are adjacent; otherwise dimension i pairs
    with i + rotated / 2.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_tokens: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that rotate."""
        return int(head_dim * self.share)


class KVShape(NamedTuple):
    """The KV of one token in one layer: a key and a value for each of `heads` KV heads."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def values(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class Experts(msgspec.Struct, frozen=True):
    """A mixture of `count` experts of inner width `width`.

    A token uses its `chosen` most likely experts; with `normalized` their weights sum to 1. Every
    token also uses `shared` experts of the same width, weighted by a gate. `dense_layers` have a
    feed-forward without experts. `limit` and `alpha` are parameters of the clamped activation.
    """

    count: int
    chosen: int
    width: int
    normalized: bool = True
    shared: int = 0
    dense_layers: tuple[int, ...] = ()
    limit: float = 0.0
    alpha: float = 0.0


class Arithmetic(msgspec.Struct, frozen=True):
    """Differences from Llama's arithmetic. On CPUs these need the compiled pass.

    norms: names of a layer's norms before and after attention, before and after the
        feed-forward; None where there is none.
    layer_norm: norms subtract the mean.
    norm_bias: norms have a bias.
    norm_offset: norms add this number to their weights.
    parallel: attention and feed-forward have the same input.
    gated: the feed-forward has gate and up projections; if False, only an up projection.
    whole_qk_norm: all query heads of a token are normed together, and all its key heads.
    attention_scale: factor of scores; None is head_dim ** -0.5.
    attention_softcap, logit_softcap: x becomes cap * tanh(x / cap); 0 means no cap.
    residual_scale: factor of the outputs of attention and feed-forward before they are added.
    layer_ropes: rotary embedding of each layer, if layers differ.
    """

    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    layer_norm: bool = False
    norm_weights: bool = True
    norm_bias: bool = False
    norm_offset: float = 0.0
    parallel: bool = False
    activation: str = "silu"
    gated: bool = True
    whole_qk_norm: bool = False
    sinks: bool = False
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    head_bias: bool = False
    layer_ropes: tuple[RopeConfig, ...] = ()
    experts: Experts | None = None


class ModelConfig(msgspec.Struct, frozen=True):
    """Shape and arithmetic of a decoder. `sliding_window[layer]` is the window in tokens (the
    token itself included) or None for full attention. `max_position_tokens` is the context length.
    `kv_shapes` has one entry per layer if `num_kv_heads` and `head_dim` do not describe all
    layers."""

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
    arithmetic: Arithmetic = Arithmetic()

    @property
    def plain(self) -> bool:
        """True if our own pass computes the model on every device."""
        return self.arithmetic == Arithmetic()

    @property
    def group_size(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Fields:
    """A JSON object. Errors name the file and the field; `names` maps our field
    names to those of the file."""

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
        """Return a positive integer. If the field is absent or null, return `default`, or raise
        ModelError without a default."""
        value, largest = self.get(field, default), _MAX_OF.get(field, _MAX_INT)
        if value is None:
            raise self.error(field, "missing; use a complete file of the model")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least else "an integer of 0 or more"
            raise self.error(field, f"must be {kind}, got {value!r:.40}")
        if value > largest:
            raise self.error(field, f"must be at most {largest}, got {value!r:.40}")
        return value

    def number(self, field: str, default: float | None = None, largest: float = math.inf) -> float:
        """Return a positive finite number of at most `largest`; `default` as in `integer`."""
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "missing; use a complete file of the model")
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value <= min(largest, _MAX_FLOAT):
            limit = "" if largest == math.inf else f" of at most {largest:g}"
            raise self.error(field, f"must be a positive number{limit}, got {value!r:.40}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r:.40}")
        return value


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def eos_ids_of(directory: Path) -> tuple[int, ...]:
    """Return the EOS ids of config, generation config and tokenizer files, without repeats. Raises
    ModelError for invalid token ids."""
    ids: list[int] = []
    for file in (directory / "config.json", directory / GENERATION_FILE):
        ids += token_ids(Fields(file, read_optional(file)), "eos_token_id")
    configs = [read_optional(directory / name) for name in _TOKENIZER_FILES]
    named = tokenizer_end_ids(configs, directory / "tokenizer.json", guess=not ids)
    ids += [token_id for token_id in named if 0 <= token_id <= _MAX_INT]
    return tuple(dict.fromkeys(ids))


def read_optional(file: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty dict if there is no file. Raises ModelError if
    unreadable."""
    return read_json_object(file) if file.exists() else {}


def require_file(file: Path) -> None:
    """Raise ModelError for a pipe, a device or a folder: reading one may never end."""
    if file.exists() and not file.is_file():
        raise ModelError(f"{file}: is a folder, a pipe or a device; use the model's file")


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError for any other file."""
    require_file(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(f"{file}: cannot be read as JSON ({err})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: must hold a JSON object, got {type(values).__name__}")
    return values


def token_ids(f: Fields, field: str) -> tuple[int, ...]:
    value = f.get(field)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _MAX_INT for i in ids):
        raise f.error(field, f"must be a token id or a list of them, got {value!r:.40}")
    return ids
