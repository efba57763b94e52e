"""The function that transformers calls for attention, and what computes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.runtime.cpu.compiled.layer_attention import (
    AttentionStep,
    CompiledAttention,
    LayerAttention,
    LayerShape,
)
from cbatch.runtime.cpu.decoder import RaggedBatch
from cbatch.runtime.cpu.transformers_backend import torch_attention
from cbatch.runtime.cpu.transformers_backend.step import HELD, AttentionLayer, Pass
from cbatch.runtime.model.config import KVShape, ModelError
from cbatch.runtime.model.kv_cache import KVCache

NAME = "cbatch"  # of the implementation, as transformers knows it
# What models hand on that asks attention for nothing.
_NEUTRAL = {
    *("cache", "cache_position", "is_causal", "layer_idx", "logits_to_keep", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings"),
    *("position_ids", "return_dict", "use_cache"),
}


def register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Of a flat batch: query [1, H, T, Dk], key and value [1, Hkv, T, ...] -> [1, T, H, Dv]."""
    layer: AttentionLayer | None = getattr(module, HELD, None)
    if layer is None or layer.owner.found is not None:
        return _enter(module, query, key, value, attention_mask, asked), None
    step = layer.owner
    out = compute(layer, query[0], key[0], value[0])
    if step.progress is not None:
        step.progress[0] += 1
    return out[None].to(query.dtype), None


def compute(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, H, Dv] of queries [H, T, Dk], once K [Hkv, T, Dk] and V are in the cache."""
    if layer.owner.elsewhere is not None:
        return layer.owner.elsewhere.compute(layer, q, k, v)
    kv, step = layer.owner.kv, layer.owner.step
    assert kv is not None
    if isinstance(step, AttentionStep):
        return step.attend(layer.prepared, kv.block_rows[layer.index], q, k, v)
    return torch_attention.attend(layer, step, kv, q, k, v)


def begin(step: Pass, batch: RaggedBatch, kv: KVCache) -> AbstractContextManager[object]:
    """Whatever the layers of a pass over `batch` share; to be held open during it. Raises
    IndexError where block tables do not hold the context."""
    step.kv = kv
    lens, tables = (batch.query_lens, batch.context_lens), batch.block_tables
    compiled = step.compiled
    if compiled is not None and kv.block_rows[0].dtype in (torch.float32, torch.bfloat16):
        blocks = kv.num_blocks + 1
        step.step = compiled.step(*lens, tables, num_blocks=blocks, block_size=kv.block_size)
        return step.step
    step.step = torch_attention.plan_step(*lens, tables, kv.block_size)
    return nullcontext()


def prepare(step: Pass) -> None:
    """Once its layers are known: by our kernels, where they can be compiled and take them all."""
    try:
        for layer in step.layers:
            shape = layer.heads, *layer.kv, layer.scale, layer.window, layer.softcap, layer.sinks
            layer.prepared = LayerAttention(LayerShape(*shape))
        step.compiled = CompiledAttention()
    except ValueError:
        step.compiled = None


_entering: list[Pass] = []


class entering:
    """While it is open, layers that a pass meets are entered into `step`."""

    def __init__(self, step: Pass) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._step.found = []
        _entering.append(self._step)

    def __exit__(self, *_: object) -> None:
        _entering.remove(self._step)
        self._step.found = None


def _enter(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    asked: dict[str, Any],
) -> Tensor:
    """Takes note of a layer; what it would give are zeros. Raises ModelError for what our attention
    does not compute."""
    (step,) = _entering
    assert step.found is not None
    name = type(module).__name__
    if any(module is other for other in step.found):
        raise ModelError(f"{name}: attends twice in a pass, with one module for two layers")
    if mask is not None:
        raise ModelError(f"{name}: gives attention a mask of its own")
    known = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
    for field, given in asked.items():
        if field not in known | _NEUTRAL and given is not None:
            raise ModelError(f"{name}: asks attention for {field}, which ours does not know")
    scale, sinks = asked.get("scaling"), asked.get("s_aux")
    layer = AttentionLayer(
        index=len(step.layers),
        owner=step,
        heads=query.shape[1],
        kv=KVShape(key.shape[1], key.shape[3], value.shape[3]),
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=asked.get("sliding_window") or None,
        softcap=asked.get("softcap") or None,
        sinks=None if sinks is None else sinks.detach().float().reshape(-1).contiguous(),
    )
    step.layers.append(layer)
    step.found.append(module)
    object.__setattr__(module, HELD, layer)
    return torch.zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3]).to(query)
