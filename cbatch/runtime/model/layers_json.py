"""Parsing of the fields of Gemma 4 by which its layers differ."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cbatch.runtime.model.config import Fields, UnsupportedModelError
from cbatch.runtime.model.records import Attention, FeedForward, LayerInputs, LayerRecord, Norm

_FULL = "full_attention"


def vary_layers(
    f: Fields, layers: list[LayerRecord], types: list[str], norm: Norm
) -> tuple[list[LayerRecord], LayerInputs | None]:
    """Return these layers of one shape with what differs, and the inputs of layers if they have
    some:

    - full layers have KV heads of another number and width, and their values may be their keys;
    - the last layers read the K and V of the last layer of their type before them, and may have
      a feed-forward of twice the width;
    - each layer may read an input of its own for each token, and scales its output.
    """
    unshared = len(layers) - f.integer("num_kv_shared_layers", 0, least=0)
    last_of_type = {kind: i for i, kind in enumerate(types[: max(unshared, 0)])}
    if not set(types) <= last_of_type.keys():
        problem = f"must leave a layer of each type with K and V, of {len(layers)} layers"
        raise f.error("num_kv_shared_layers", problem)
    injection, inputs = _inputs(f, layers[0].feed_forward, norm)
    varied: list[LayerRecord] = []
    for i, (layer, kind) in enumerate(zip(layers, types, strict=True)):
        m, forward = layer.mixer, layer.feed_forward
        assert isinstance(m, Attention) and isinstance(forward, FeedForward)
        m = replace(
            m,
            **_heads(f, i, kind == _FULL, m),
            value_norm=Norm("norm", norm.eps, has_weight=False),
            keys_are_values=kind == _FULL and f.flag("attention_k_eq_v", False),
        )
        if i >= unshared:
            source = varied[last_of_type[kind]].mixer
            assert isinstance(source, Attention)
            if (source.kv_heads, source.key_dim) != (m.kv_heads, m.key_dim):
                problem = f"layer {i} has other KV heads than the layer whose K and V it reads"
                raise f.error("per_layer_config", problem)
            m = replace(m, kv_from=last_of_type[kind])
            if f.flag("use_double_wide_mlp", False):
                forward = replace(forward, inner=2 * forward.inner)
        varied.append(LayerRecord(m, forward, injection=injection, scaled=True))
    return varied, inputs


def _inputs(f: Fields, forward: Any, norm: Norm) -> tuple[FeedForward | None, LayerInputs | None]:
    """Return the branch that reads a layer's inputs, and these."""
    width = f.integer("hidden_size_per_layer_input", least=0)
    if not width:
        return None, None
    vocab, own_vocab = f.integer("vocab_size"), f.get("vocab_size_per_layer_input")
    if own_vocab not in (None, vocab):
        problem = f"must be vocab_size, {vocab}; got {own_vocab!r:.40}"
        raise f.error("vocab_size_per_layer_input", problem, UnsupportedModelError)
    branch = FeedForward(
        out_norm=replace(norm, name="post_per_layer_input_norm"),
        inner=width,
        activation=forward.activation,
        gated=False,
    )
    return branch, LayerInputs(width, replace(norm, name="per_layer_projection_norm"))


def _heads(f: Fields, index: int, full: bool, m: Attention) -> dict[str, int]:
    """Return the number and width of a layer's KV heads. `per_layer_config` has them by layer;
    older files have them for all full layers."""
    values, prefix = {}, ""
    by_layer = f.get("per_layer_config")
    if by_layer is None and full:
        values["head_dim"] = f.integer("global_head_dim")
        if f.flag("attention_k_eq_v", False):
            values["num_key_value_heads"] = f.integer("num_global_key_value_heads", m.kv_heads)
    elif by_layer is not None:
        known = {"head_dim", "num_key_value_heads"}
        rows = None
        if isinstance(by_layer, dict):  # names may begin with zeros
            rows = {str(name).lstrip("0") or "0": row for name, row in by_layer.items()}
        values = {} if rows is None else rows.get(str(index), {})
        if rows is None or not isinstance(values, dict) or not values.keys() <= known:
            problem = f"must name {' and '.join(sorted(known))} by layer, got {by_layer!r:.80}"
            raise f.error("per_layer_config", problem, UnsupportedModelError)
        prefix = f"per_layer_config.{index}."
    own = Fields(f.path, values, prefix, f.names)
    width = own.integer("head_dim", m.key_dim)
    kv_heads = own.integer("num_key_value_heads", m.kv_heads)
    if width % 2 or m.heads % kv_heads:
        problem = f"{m.heads} heads share {kv_heads} KV heads of {width} numbers"
        raise own.error("head_dim", problem)
    return {"kv_heads": kv_heads, "key_dim": width, "value_dim": width}
