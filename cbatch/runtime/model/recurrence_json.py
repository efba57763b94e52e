"""Parsing of recurrent layers in `config.json`."""

from __future__ import annotations

import math
from typing import Any

from cbatch.runtime.model.config import Fields, UnsupportedModelError
from cbatch.runtime.model.families import Family, RecurrenceFields
from cbatch.runtime.model.records import Recurrence

_FULL = ("full_attention", "attention")
_MAX_KERNEL = 16  # tokens of a convolution
_BLOCKS = {"M": "linear_attention", "mamba": "linear_attention", "-": "mlp"}
_BLOCKS |= {"*": "full_attention", "attention": "full_attention", "E": "moe"}


def join_blocks(f: Fields) -> dict[str, Any]:
    """Return the fields of layers that a list of blocks describes (Nemotron-H): each mixer is a
    layer, with the feed-forward that follows it, if one does."""
    field = "layers_block_type"
    names = f.get(field, f.get("hybrid_override_pattern"))
    if not isinstance(names, list | str) or not names:
        raise f.error(field, "missing; use a complete file of the model")
    types: list[str] = []
    alone: list[int] = []
    for name in names:
        block = _BLOCKS.get(name, name) if isinstance(name, str) else name
        if block == "mlp" and alone[-1:] == [len(types) - 1]:
            alone.pop()
        elif block in ("linear_attention", "full_attention"):
            alone.append(len(types))
            types.append(block)
        else:
            problem = f"{block!r:.40} after {types[-1:]} is not supported"
            raise f.error(field, problem, UnsupportedModelError)
    return {"layer_types": types, "num_hidden_layers": len(types), "without_forward": alone}


def parse_recurrence(f: Fields, family: Family, branch: dict[str, Any]) -> list[Recurrence | None]:
    """Return the recurrence of each layer; None for a layer with attention."""
    layers, fields = f.integer("num_hidden_layers"), family.recurrence
    if fields is None:
        return [None] * layers
    recurrence = _recurrence(f, fields, branch | {"tiled": family.tiled})
    return [recurrence if each else None for each in _recurrent(f, family, fields, layers)]


def _recurrent(f: Fields, family: Family, fields: RecurrenceFields, layers: int) -> list[bool]:
    types, full = f.get(fields.types), f.get("full_attn_idxs")
    if types is None and full is not None:
        if not isinstance(full, list) or not all(type(each) is int for each in full):
            raise f.error("full_attn_idxs", f"must be a list of layers, got {full!r:.40}")
        return [i not in full for i in range(layers)]
    if types is None:
        interval = f.integer("full_attention_interval", family.full_every, least=0)
        return [not interval or bool((i + 1) % interval) for i in range(layers)]
    known = (*_FULL, *fields.kinds)
    valid = isinstance(types, list) and all(isinstance(t, str) and t in known for t in types)
    if not valid or len(types) != layers:
        names = ", ".join((_FULL[0], fields.kinds[0]))
        problem = f"must name {layers} layers, each one of {names}; got {types!r:.80}"
        raise f.error(fields.types, problem)
    return [each not in _FULL for each in types]


def _recurrence(f: Fields, fields: RecurrenceFields, branch: dict[str, Any]) -> Recurrence:
    kernel = f.integer(fields.kernel)
    if not 2 <= kernel <= _MAX_KERNEL:
        raise f.error(fields.kernel, f"must be 2 to {_MAX_KERNEL}, got {kernel}")
    bias, conv_bias = (bool(n) and f.flag(n, False) for n in (fields.bias, fields.conv_bias))
    settings: Any = {"kernel": kernel, "bias": bias, "out_bias": bias, "conv_bias": conv_bias}
    if fields.rule == "convolution":
        width = f.integer("hidden_size")
        return Recurrence(**branch, **settings, rule=fields.rule, heads=1, value_dim=width)
    heads, key_heads = f.integer(fields.heads), f.integer(fields.key_heads)
    min_step, max_step = _step_limits(f, fields)
    value_dim = f.get(fields.value_dim)
    if value_dim == "auto":
        inner = f.integer("mamba_expand") * f.integer("hidden_size")
        value_dim = f.integer("mamba_d_ssm", inner) // heads
    else:
        value_dim = f.integer(fields.value_dim)
    normed = not fields.normed or f.flag(fields.normed, False)
    if fields.normed and normed and f.flag("mamba_norm_before_gate", True):
        raise f.error("mamba_norm_before_gate", "only false is supported", UnsupportedModelError)
    if heads % key_heads:
        raise f.error(fields.key_heads, f"{key_heads} does not divide {heads} heads")
    return Recurrence(
        **branch,
        **settings,
        rule=fields.rule,
        heads=heads,
        value_dim=value_dim,
        key_heads=key_heads,
        key_dim=f.integer(fields.key_dim),
        norm_eps=branch["norm"].eps if normed else 0.0,
        groups=key_heads,
        min_step=min_step,
        max_step=max_step,
    )


def _step_limits(f: Fields, fields: RecurrenceFields) -> tuple[float, float]:
    """Return the limits of dt; transformers 5 writes infinity as an object."""
    if fields.min_step:
        return f.number(fields.min_step), math.inf
    given = f.get("time_step_limit", [0.0, math.inf])
    try:
        low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in given)
    except (KeyError, TypeError, ValueError):
        raise f.error("time_step_limit", f"must be two numbers, got {given!r:.40}") from None
    return low, high
