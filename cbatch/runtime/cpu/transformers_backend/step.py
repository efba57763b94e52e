"""The state that a model's attention layers share: the current step, and the layers themselves.

transformers calls one function for every attention layer (see `attention`), and some of its modules
drop extra arguments. So each attention module has its `AttentionLayer` as an attribute. All layers
of a model refer to one `Pass`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.runtime.compiled.layer_attention import CompiledAttention, LayerAttention
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import KVShape

LAYER = "_cbatch_layer"  # the attribute of an attention module that holds its layer


@dataclass(eq=False)
class AttentionLayer:
    """One attention layer: its `index` in a pass, and its parameters in the modelling code.

    `window` is in tokens, the token itself included. With `softcap`, scores become
    softcap * tanh(score / softcap). `sinks` fp32 [heads] are further scores in the softmax.
    """

    index: int
    owner: Pass
    heads: int
    kv: KVShape
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    prepared: LayerAttention | None = None  # the layer for our kernels


class LayerStep(Protocol):
    """A step whose attention runs neither in our CPU kernels nor in torch."""

    def compute(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K [Hkv, T, Dk] and V, then return [T, H, Dv] for queries [H, T, Dk]."""
        ...


@dataclass(eq=False)
class Pass:
    """The current step, as a model's attention layers read it. While `registered` is a list,
    attention is not computed: each call registers its layer there."""

    layers: list[AttentionLayer] = field(default_factory=list)
    registered: list[nn.Module] | None = None
    progress: NDArray[np.int64] | None = None
    kv: KVCache | None = None
    compiled: CompiledAttention | None = None  # set if our kernels compute attention
    step: Any = None  # the current step, in the form of the implementation in use
    elsewhere: LayerStep | None = None  # the current step on another device
