"""The architectures of GGUF files: how each file's metadata say what a `config.json` would."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from cbatch.runtime.model.families import Family, family_named, merged_entry

_FILE = Path(__file__).with_suffix(".toml")


class GgufArchitecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value of `general.architecture`, as an entry of gguf_architectures.toml describes it.

    family: `model_type` of the config.
    windowed_family, expert_family: the same for files with a sliding window, or with experts.
    changes: fields of the family that differ, since llama.cpp's converter changes weights. Its
        files keep neighbours in a rotary pair (`interleaved`) where llama.cpp rotates such pairs.
    keys: fields of config.json -> GGUF keys without the prefix; added to those of all files.
    values: fields of config.json that have these values without their key.
    required: keys without the prefix -> the only value that is supported.
    ignored: keys whose value does not matter.
    names: tensors with other names than in Llama's files.
    fused_gate: `ffn_up` holds the rows of the gate, too.
    width_scaled_layers: with this number of layers, attention is scaled as if heads were as wide as
        the hidden size divided by their number.
    """

    family: str
    windowed_family: str = ""
    expert_family: str = ""
    changes: dict[str, Any] = {}
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    required: dict[str, Any] = {}
    ignored: tuple[str, ...] = ()
    names: dict[str, str] = {}
    fused_gate: bool = False
    width_scaled_layers: int = 0

    def family_of(self, *, windowed: bool, experts: bool, **biases: bool) -> Family:
        """Return the family of a file, with the differences of its files."""
        name = (experts and self.expert_family) or (windowed and self.windowed_family)
        fields = msgspec.to_builtins(family_named(name or self.family))
        return msgspec.convert(fields | self.changes | biases, Family)


@functools.lru_cache(maxsize=1)
def architectures() -> dict[str, GgufArchitecture]:
    """Return all architectures by name."""
    entries = msgspec.toml.decode(_FILE.read_bytes())
    return {
        name: msgspec.convert(merged_entry(name, entries), GgufArchitecture) for name in entries
    }
