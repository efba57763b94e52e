"""Lowers the records of a model and their weights to the structs of the compiled pass (step.h).

Which steps are fused is decided here, and nowhere else:
- the weight of a norm is folded into fp32 weights after it (`folded`);
- a normed row is converted to the form of the next product at once (`norm.keeps_rows`);
- an output that is added as it is, is added by the last product (`branch.adds_later`);
- an activation is computed by the product before it (`feed_forward.gates_in_product`).
The last two depend on the processor, through the form of the rows that a product reads.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cbatch.runtime.compiled.experts import Gating
from cbatch.runtime.compiled.product import CompiledProduct, address_of
from cbatch.runtime.compiled.structs import constants, struct
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.layers import Layer, PairWeights, RecurrenceWeights
from cbatch.runtime.model.records import (
    Attention,
    Branch,
    Experts,
    FeedForward,
    Norm,
    PairInput,
    Recurrence,
)

_NormKind, _QkNorm, _RowForm, _Rule = map(constants, ("norm_kind", "qk_norm", "row_form", "rule"))


def product_of(linear: Linear | None) -> Any:
    """Return the struct of a product; None has no parts."""
    if linear is None:
        return struct("linear")()
    assert isinstance(linear.compiled, CompiledProduct)
    return linear.compiled.struct


def folded(weight: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Fold the weight of the norm before a product into the product's, unless this would round."""
    if norm is None or weight.dtype != torch.float32:
        return weight, norm
    return weight * norm, None


def lower_norm(norm: Norm | None, weight: Tensor | None, *, keeps_rows: bool = True) -> Any:
    if norm is None:
        return struct("norm")(keeps_rows=keeps_rows)
    kind = _NormKind.LAYER_NORM if norm.centred else _NormKind.RMS_NORM
    return struct("norm")(address_of(weight), norm.eps, kind, keeps_rows)


def norm_before(norm: Norm | None, linear: Linear) -> Any:
    """Lower the norm before a product, which has what is not folded of the norm's weight."""
    product = linear.compiled
    assert product is not None
    keeps_rows = product.row_form == _RowForm.FLOATS
    return lower_norm(norm, product.scale, keeps_rows=keeps_rows)


def lower_layers(layers: Sequence[Layer[Linear]], max_tokens: int) -> Any:
    """Return an array of the layers' structs, without `cos_sin`. A window of `max_tokens`, the
    context length, has no effect."""
    structs = (struct("layer") * len(layers))(*(_layer(layer, max_tokens) for layer in layers))
    for before, at in itertools.pairwise(structs):
        before.mixer.joins.adds_later |= at.joint
    return structs


def _branch(branch: Branch, before: Any, after: Tensor | None) -> Any:
    later = not branch.adds_plainly or isinstance(branch, Experts)
    return struct("branch")(before, lower_norm(branch.out_norm, after), branch.out_scale, later)


def _layer(layer: Layer[Linear], max_tokens: int) -> Any:
    m, f, parallel = layer.record.mixer, layer.record.feed_forward, layer.record.parallel
    assert not parallel or (isinstance(f, FeedForward) and f.adds_plainly)
    shared = {
        "joins": _branch(m, norm_before(m.norm, layer.qkv), layer.after_attention),
        "qkv": product_of(layer.qkv),
        "out": product_of(layer.out),
    }
    if isinstance(m, Recurrence):
        mixer, state = struct("attention")(**shared), _recurrence(m, layer.recurrence)
    else:
        mixer, state = _attention(layer, m, max_tokens, shared), struct("recurrence")()
    forward = struct("feed_forward")() if f is None else _feed_forward(layer, f)
    return struct("layer")(mixer, state, forward, parallel, -1, layer.record.joint)


def _feed_forward(layer: Layer[Linear], f: FeedForward | Experts) -> Any:
    if isinstance(f, Experts):
        before = lower_norm(f.norm, layer.router_norm)
    else:
        before = norm_before(f.norm, layer.gate_up)
    forward = struct("feed_forward")(
        joins=_branch(f, before, layer.after_forward),
        gate_up=product_of(layer.gate_up),
        down=product_of(layer.down),
        inner=f.inner,
        activation=Gating[f.activation.upper()],
        gated=f.gated if isinstance(f, FeedForward) else True,
        gates_in_product=_gates_in_product(layer),
        xielu=address_of(layer.xielu),
    )
    if isinstance(f, Experts):
        mixture = layer.experts.mixture(f)
        mixture.correction = address_of(layer.router_bias)
        mixture.sigmoid, mixture.scale = f.sigmoid, f.scale
        forward.experts = ctypes.pointer(mixture)
    return forward


def _attention(layer: Layer[Linear], m: Attention, max_tokens: int, shared: dict[str, Any]) -> Any:
    return struct("attention")(
        **shared,
        qk_weight=address_of(layer.qk_weight),
        sinks=address_of(layer.sinks),
        kv_heads=m.kv_heads,
        group=m.group,
        dim=m.key_dim,
        value_dim=m.value_dim,
        window=m.window or max_tokens,
        qk_norm=_qk_norm(m),
        scale=m.scale,
        cap=m.soft_cap,
        gates=m.group * m.value_dim if m.gate else 0,
        qk_eps=0.0 if m.qk_norm is None else m.qk_norm.eps,
    )


def _recurrence(m: Recurrence, weights: RecurrenceWeights | None) -> Any:
    assert weights is not None
    return struct("recurrence")(
        *map(address_of, weights),
        rule=_Rule[m.rule.upper()],
        kernel=m.kernel,
        channels=m.channels,
        heads=m.heads,
        key_heads=m.key_heads,
        tiled=m.tiled,
        key_dim=m.key_dim,
        value_dim=m.value_dim,
        groups=m.groups,
        norm_eps=m.norm_eps,
        min_step=m.min_step,
        max_step=m.max_step,
    )


def _qk_norm(m: Attention) -> int:
    if m.qk_norm is None:
        return int(_QkNorm.NO_QK_NORM)
    by_head = _QkNorm.EACH_ROTATED if m.norms_rotated else _QkNorm.EACH_HEAD
    return int(_QkNorm.ALL_HEADS if m.norms_whole else by_head)


def _gates_in_product(layer: Layer[Linear]) -> bool:
    f, gate_up, down = layer.record.feed_forward, layer.gate_up.compiled, layer.down
    if not isinstance(f, FeedForward) or f.activation != "silu" or not f.gated:
        return False
    assert gate_up is not None and down is not None and down.compiled is not None
    return gate_up.can_gate and down.compiled.row_form == _RowForm.PAIRS


def lower_pairs(pair: PairInput, weights: PairWeights) -> Any:
    return struct("pair_input")(
        product_of(weights.input_layer),
        product_of(weights.only_kv),
        lower_norm(pair.token_norm, weights.token_norm),
        lower_norm(pair.state_norm, weights.state_norm),
        pair.normed_residual,
    )
