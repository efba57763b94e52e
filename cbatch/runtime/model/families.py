"""Model families that our own pass computes: how each `config.json` differs from Llama's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import msgspec

_FILE = Path(__file__).with_suffix(".toml")


class ExpertFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config fields of a family's experts.

    `width` names the field with the inner width of an expert. `shared` names the field with the
    total inner width of the experts that every token uses. `normalized`: a token's expert weights
    always sum to 1; otherwise the field `norm_topk_prob` decides. `clamped`: gpt-oss's activation.
    `dense` names the number of first layers without experts. `correction` names the field that
    decides whether a bias corrects the choice by sigmoids; "": the weights are a softmax.
    `shared_gate`: a gate weights the shared experts. Without it, a model may have no other experts.
    """

    width: str
    shared: str = ""
    normalized: bool = False
    clamped: bool = False
    shared_gate: bool = True
    dense: str = ""
    correction: str = ""


class RecurrenceFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config fields of a family's recurrent layers, by the fields of `Recurrence`.

    `types` names the field with each layer's type, `kinds` the types that are recurrent. Without
    that field, every `full_every`th layer has attention. `normed` names the field that decides
    whether the output is normed; "": it is.
    """

    rule: Literal["convolution", "delta", "scan"]
    kinds: tuple[str, ...]
    kernel: str
    types: str = "layer_types"
    bias: str = ""
    conv_bias: str = ""
    heads: str = ""
    value_dim: str = ""
    key_heads: str = ""
    key_dim: str = ""
    min_step: str = ""
    normed: str = ""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One architecture, as an entry of families.toml describes it.

    name: `model_type` of the config.
    names: where a checkpoint's tensor names differ: suffix of our module name -> the checkpoint's.
    fused: matrices that the checkpoint stores as one.
    stacked: a layer's experts are one tensor with outputs or inputs first; "": a tensor per expert.
    defaults: the values that transformers assumes for absent fields.
    qk_norm: whether each head is normed (`rotated`: after the rotation), or all heads of a token
        together.
    qkv_bias, out_bias, mlp_bias: present, absent, or the name of the field that decides.
    windows: the layers with a sliding window: `all`; those called sliding in `layer_types`, or
        without that list all but every `full_every`th (`typed`); those from `max_window_layers`
        on (`late`).
    ropes: `one` for all layers; one for each of `layer_types` (`typed`); only on layers with a
        window (`windowed`); only on layers where `no_rope_layers` has a 1 (`listed`); one whose
        type `dynamic` has a fixed `alpha` (`alpha`).
    interleaved: the two dimensions of a rotary pair are neighbours.
    eps: the field with the epsilon of norms.
    norms: names of a layer's norms before and after attention, before and after the feed-forward.
    norm: fields of `Norm` that all norms share.
    parallel: attention and feed-forward read the same normed input.
    gated, sinks, gate, head_bias: fields of the records.
    grouped: the projections of a delta rule are two tensors, by key head.
    tiled: a field of `Recurrence`.
    blocks: a layer of the checkpoint is a mixer or a feed-forward.
    without: fields of the entry that `like` names that do not apply.
    joint: each layer has attention and, on the same input, a recurrence.
    scales: name of a matrix -> the config fields with its factors; a list of a field has a factor
        for each part of the first projection of a recurrence, or `field.i` names one of its values.
    wrappers: architectures with other parts, such as a vision tower, whose `text_config` this is.
    numbers: factors and caps of the records -> (config field, power that it is raised to).
    unsupported: fields that must be absent, null or false.
    """

    name: str
    names: dict[str, str] = {}
    fused: tuple[str, ...] = ()
    stacked: Literal["", "outputs", "inputs"] = ""
    defaults: dict[str, Any] = {}
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: Literal["", "heads", "rotated", "whole"] = ""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    norm: dict[str, Any] = {}
    parallel: bool = False
    gated: bool = True
    sinks: bool = False
    gate: bool = False
    head_bias: bool = False
    windows: Literal["none", "all", "typed", "late"] = "none"
    full_every: int = 0
    ropes: Literal["one", "typed", "windowed", "listed", "alpha"] = "one"
    interleaved: bool = False
    eps: str = "rms_norm_eps"
    numbers: dict[str, tuple[str, float]] = {}
    experts: ExpertFields | None = None
    recurrence: RecurrenceFields | None = None
    unsupported: tuple[str, ...] = ()
    grouped: bool = False
    tiled: bool = False
    blocks: bool = False
    joint: bool = False
    scales: dict[str, tuple[str, ...]] = {}
    wrappers: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Return all families by architecture name."""
    entries = msgspec.toml.decode(_FILE.read_bytes())
    return {name: msgspec.convert(merged_entry(name, entries), Family) for name in entries}


def family_named(name: str) -> Family:
    """Return the family whose `model_type` is `name`."""
    return next(family for family in families().values() if family.name == name)


def merged_entry(name: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return an entry merged over the entry that its `like` names; tables are merged, too."""
    own = dict(entries[name])
    base = merged_entry(own.pop("like"), entries) if "like" in own else {}
    base = {key: value for key, value in base.items() if key not in own.get("without", ())}
    tables = [key for key in own if isinstance(own[key], dict) and key in base]
    return base | own | {key: base[key] | own[key] for key in tables}
