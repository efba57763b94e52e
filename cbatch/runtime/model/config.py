"""A model in one form for every family; validated access to JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from cbatch.core.request.errors import InputError
from cbatch.runtime.model.end_tokens import tokenizer_end_ids
from cbatch.runtime.model.quantisation import Quantisation
from cbatch.runtime.model.records import (
    Attention,
    Experts,
    FeedForward,
    LayerRecord,
    Norm,
    PairInput,
    Recurrence,
    is_llama_like,
)

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


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder: token embeddings times `embedding_scale`, its layers, and the LM head. Logits are
    multiplied by `logit_scale` and become cap * tanh(logit / cap) with the cap `logit_softcap`; 0
    means no cap. `max_position_tokens` is the context length. With `input`, it is a draft head.
    `scales` are factors of matrices of the checkpoint by name.

    The properties describe the first layer, or the first with attention; use them where all layers
    have its shape.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position_tokens: int
    layers: tuple[LayerRecord, ...]
    norm: Norm | None
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    input: PairInput | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str | None = None
    quantisation: Quantisation | None = None
    scales: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def plain(self) -> bool:
        """True if all layers are Llama's, so that ranks can share them and heads can draft."""
        rest = self.embedding_scale, self.head_bias, self.logit_scale, self.logit_softcap
        if self.recurrent:
            return False
        shapes = {
            (replace(each.mixer, window=None), each.feed_forward, each.parallel)
            for each in self.layers
        }
        if len(shapes) > 1 or not all(map(is_llama_like, self.layers)):
            return False
        norm_is_plain = self.norm is not None and self.norm == Norm(self.norm.name, self.norm.eps)
        return norm_is_plain and rest == (1.0, False, 1.0, 0.0)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """Return the first attention; one without heads if there is none."""
        mixers = (each.mixer for each in self.layers if isinstance(each.mixer, Attention))
        return next(mixers, Attention(heads=0, kv_heads=0, key_dim=0, value_dim=0, scale=1.0))

    @property
    def recurrent(self) -> bool:
        """True if a layer has a state."""
        return any(isinstance(each.mixer, Recurrence) for each in self.layers)

    @property
    def state_page_bytes(self) -> int:
        """Return the bytes of the states of all recurrent layers at one block boundary."""
        mixers = (each.mixer for each in self.layers if isinstance(each.mixer, Recurrence))
        return 4 * sum(mixer.page_floats for mixer in mixers)

    @property
    def feed_forward(self) -> FeedForward | Experts:
        feed_forward = self.layers[0].feed_forward
        assert feed_forward is not None
        return feed_forward

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def widest_inner(self) -> int:
        """Return the largest inner width of the feed-forwards; 0 without one."""
        blocks = [layer.feed_forward for layer in self.layers]
        return max((block.inner for block in blocks if block is not None), default=0)

    def with_mixers(self, **changes: Any) -> ModelConfig:
        """Return the config with these fields of every mixer replaced."""
        layers = (replace(each, mixer=replace(each.mixer, **changes)) for each in self.layers)
        return replace(self, layers=tuple(layers))

    def with_feed_forwards(self, **changes: Any) -> ModelConfig:
        """Return the config with these fields of every feed-forward replaced."""
        layers = [
            replace(each, feed_forward=each.feed_forward and replace(each.feed_forward, **changes))
            for each in self.layers
        ]
        return replace(self, layers=tuple(layers))


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
