"""Parsing of the rotary embeddings in `config.json`."""

from __future__ import annotations

import math

from msgspec.structs import replace

from cbatch.runtime.model.config import Fields, UnsupportedModelError
from cbatch.runtime.model.families import Family
from cbatch.runtime.model.records import Rope

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


def parse_ropes(
    f: Fields,
    family: Family,
    windows: tuple[int | None, ...],
    types: list[str] | None,
    head_dim: int,
) -> tuple[Rope, list[Rope]]:
    """Return the rope that decides the context length, and the rope of each layer."""
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
        return by_type["full_attention"], [by_type[kind] for kind in types]
    rope = _rope(f, family, head_dim)
    no_rope = replace(rope, type="none", attention_factor=1.0)
    field = "position_embedding_type"
    if field in family.defaults and f.get(field) not in ("rope", True):
        return rope, [no_rope] * len(windows)
    if family.ropes == "windowed" and any(windows):
        return rope, [no_rope if window is None else rope for window in windows]
    if family.ropes == "listed":
        layers, interval = len(windows), f.integer("no_rope_layer_interval")
        # 1 for a layer with a rope, despite the name of the field.
        flags = f.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
        valid = isinstance(flags, list) and all(type(each) is int for each in flags)
        if not valid or len(flags) != layers or not {0, 1}.issuperset(flags):
            problem = f"must be {layers} numbers, each 0 or 1; got {flags!r:.40}"
            raise f.error("no_rope_layers", problem)
        return rope, [rope if each else no_rope for each in flags]
    return rope, [rope] * len(windows)


def _rope(f: Fields, family: Family, head_dim: int) -> Rope:
    """Parse the fields of a rope: `rope_parameters` (transformers 5), or `rope_theta` with
    `rope_scaling` (earlier)."""
    context_tokens = f.integer("max_position_embeddings")
    field = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    raw = f.get(field, {})
    if not isinstance(raw, dict):
        raise f.error(field, f"must be an object, got {raw!r:.40}")
    r = Fields(f.path, raw, f"{field}.", f.names)
    kind = r.get("rope_type", r.get("type", "default"))
    stretches_base = family.ropes == "alpha" and kind == "dynamic" and r.get("alpha") is not None
    if kind not in _ROPE_TYPES and not stretches_base:
        problem = f"{kind!r:.40} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        raise r.error("rope_type", problem, UnsupportedModelError)
    share = r.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0), 1.0)
    if share != 1.0 and "partial_rotary_factor" not in family.defaults:
        raise r.error("partial_rotary_factor", "only 1.0 is supported", UnsupportedModelError)
    theta = r.number("rope_theta", f.number("rope_theta", Rope().theta))
    plain = Rope(theta=theta, share=share, interleaved=family.interleaved)
    if plain.rotated(head_dim) % 2:
        rotated = plain.rotated(head_dim)
        problem = f"must rotate an even number of dimensions; {share!r} of {head_dim} is {rotated}"
        raise r.error("partial_rotary_factor", problem)
    if stretches_base:  # whatever the length
        stretch = r.number("alpha") ** (head_dim / (head_dim - 2)) if head_dim > 2 else 1.0
        return replace(plain, theta=theta * stretch)
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


def _longrope(r: Fields, plain: Rope, original: int, factor: float, pairs: int) -> Rope:
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
