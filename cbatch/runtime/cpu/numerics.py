"""The arithmetic of a model: batch-invariant or fast.

A model is batch-invariant if other rows of the step do not change the bits of a row's logits. The
chunks of a prompt, and the blocks of its KV, must not change them either.
"""

from __future__ import annotations

import torch

from cbatch.runtime.cpu.linear import make_plan
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.shapes import Numerics, num_weights, weight_shapes
from cbatch.system.machine import memory_bytes

_PACK_BYTES_SHARE = 0.5  # limit of packed fp32 copies, as a share of the machine's memory


def resolve_numerics(requested: str, config: ModelConfig, dtype: torch.dtype) -> Numerics:
    """Resolve "auto": "invariant" if every product of the model can be invariant, else "fast"."""
    may_pack = 4 * num_weights(config) < _PACK_BYTES_SHARE * memory_bytes()
    if requested == "auto":
        plans = [
            make_plan(shape, dtype, invariant=True, may_pack=may_pack)
            for shape in weight_shapes(config)
        ]
        requested = "invariant" if all(plan.invariant for plan in plans) else "fast"
    return Numerics(requested, may_pack)
