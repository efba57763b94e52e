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

from cbatch.runtime.model.records import Attention

LAYER = "_cbatch_layer"  # the attribute of an attention module that holds its layer


@dataclass(eq=False)
class AttentionLayer:
    """One attention layer: its `index` in a pass, its record, and the `sinks`, fp32 [heads]."""

    index: int
    owner: Pass
    mixer: Attention
    sinks: Tensor | None
    prepared: Any = None  # the layer in a form for the device's kernels, if they need one


class LayerStep(Protocol):
    """The attention of a step, on the device of its model."""

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
    step: LayerStep | None = None
