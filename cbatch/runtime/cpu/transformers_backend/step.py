"""The step that a pass computes, and the layers of attention that it goes through.

transformers calls one function for every layer of every model (see `attention`), and not all of its
modules hand on what a caller passes them: so each attention module holds its `AttentionLayer`, and
that the `Pass` which all of a model share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.runtime.cpu.compiled.layer_attention import CompiledAttention, LayerAttention
from cbatch.runtime.model.config import KVShape
from cbatch.runtime.model.kv_cache import KVCache

HELD = "_cbatch_layer"  # the attribute of an attention module that holds its layer


@dataclass(eq=False)
class AttentionLayer:
    """One call of attention in a pass: number `index`, and what the modelling code asks for.

    `window` is in tokens, the token itself included; `softcap` is where scores are bent by
    cap * tanh(score / cap); `sinks` fp32 [heads] join the sum under the softmax.
    """

    index: int
    owner: Pass
    heads: int
    kv: KVShape
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    prepared: LayerAttention | None = None  # for our kernels


class LayerStep(Protocol):
    """A step whose attention is neither our kernels' for CPUs nor torch's."""

    def compute(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, H, Dv] of queries [H, T, Dk], once K [Hkv, T, Dk] and V are in the cache."""
        ...


@dataclass(eq=False)
class Pass:
    """What a model's attention layers read of the step under way. While `found` is a list, nothing
    is attended to: layers are entered there as they are met."""

    layers: list[AttentionLayer] = field(default_factory=list)
    found: list[nn.Module] | None = None
    progress: NDArray[np.int64] | None = None
    kv: KVCache | None = None
    compiled: CompiledAttention | None = None  # where our kernels compute
    step: Any = None  # the one under way, as what computes attention has it
    elsewhere: LayerStep | None = None  # on another device
