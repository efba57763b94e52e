"""Records that a GPU computes. This module can be imported without triton."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention, Experts, FeedForward, Recurrence

_ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared", "xielu")
_BRANCH = ("norm", "out_norm", "out_scale")
# The fields that are interpreted, by record. Another one must have its default.
_FIELDS: dict[type, tuple[str, ...]] = {
    Attention: (
        *_BRANCH,
        *("heads", "kv_heads", "key_dim", "value_dim", "scale", "rope", "window", "soft_cap"),
        *("bias", "out_bias", "qk_norm", "norms_whole", "norms_rotated", "sinks", "gate"),
    ),
    FeedForward: (*_BRANCH, "inner", "activation", "gated", "bias"),
    Experts: (
        *_BRANCH,
        *("count", "chosen", "inner", "activation", "normalized", "shared", "shared_inner", "bias"),
        *("limit", "alpha", "shared_gate", "sigmoid", "corrected", "scale"),
    ),
    Recurrence: (
        *_BRANCH,
        *("rule", "heads", "value_dim", "kernel", "key_heads", "key_dim", "bias", "out_bias"),
        *("conv_bias", "norm_eps", "groups", "min_step", "max_step", "tiled"),
    ),
}


def unsupported_on_gpu(config: ModelConfig) -> str | None:
    """Return what of a model's records a GPU does not compute; None if it computes all."""
    for layer in config.layers:
        m, f = layer.mixer, layer.feed_forward
        if layer.injection is not None or layer.scaled:
            return "layers with inputs or a scale of their own"
        problem = _uninterpreted(m) or (None if f is None else _uninterpreted(f))
        if problem is not None:
            return problem
        if isinstance(m, Attention) and m.key_dim != m.value_dim:
            return "values narrower than keys"
        if isinstance(m, Attention) and m.norms_rotated and m.rope.attention_factor != 1.0:
            return "norms after a rotation that scales"
        if f is None:
            continue
        if isinstance(f, Experts) and f.activation == "xielu":
            return "experts with the activation xielu"
        if isinstance(f, Experts) and f.shared and f.bias:
            return "a router's bias with shared experts"
        clamped = isinstance(f, Experts) and f.activation == "clamped"
        if f.activation not in _ACTIVATIONS and not clamped:
            return f"the activation {f.activation}"
        if layer.parallel and m.norm != f.norm:
            return "parallel branches with different norms"
    mixers = [each.mixer for each in config.layers if isinstance(each.mixer, Attention)]
    shapes = {(m.kv_heads, m.group, m.key_dim) for m in mixers}
    if not shapes:
        return "no layer with attention"
    return "layers with heads of different shapes" if len(shapes) > 1 else None


def _uninterpreted(record: Any) -> str | None:
    known = _FIELDS.get(type(record))
    if known is None:
        return type(record).__name__.lower()
    for field in structs.fields(record):
        if field.name not in known and getattr(record, field.name) != field.default:
            return field.name
    return None
