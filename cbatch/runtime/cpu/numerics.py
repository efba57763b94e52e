"""The arithmetic of a model: row-invariant or fast.

A model is row-invariant (batch-invariant) if other rows of the step do not change the bits of a
row's logits. Nor may the chunks of a prompt, or the blocks that hold its KV.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

import torch

from cbatch.runtime.cpu.linear import make_plan
from cbatch.runtime.model.config import ModelConfig

_PACK_BYTES_SHARE = 0.5  # limit of packed fp32 copies, as a share of the machine's memory


class Numerics(NamedTuple):
    """How a model computes: `mode` is "invariant" or "fast"; `may_pack`: there is memory for packed
    fp32 weights."""

    mode: str
    may_pack: bool


def resolve_numerics(requested: str, config: ModelConfig, dtype: torch.dtype) -> Numerics:
    """Turn "auto" into "invariant" if every product of the model can be, else into "fast"."""
    may_pack = 4 * num_weights(config) < _PACK_BYTES_SHARE * memory_bytes()
    if requested == "auto":
        plans = [
            make_plan(shape, dtype, invariant=True, may_pack=may_pack)
            for shape in weight_shapes(config)
        ]
        requested = "invariant" if all(plan.invariant for plan in plans) else "fast"
    return Numerics(requested, may_pack)


def weight_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """Return [out, in] of the fused products, and how many of each a forward pass runs."""
    c, hidden = config, config.hidden_size
    queries = c.num_heads * c.head_dim
    shapes: Counter[tuple[int, int]] = Counter()
    shapes[queries + 2 * c.num_kv_heads * c.head_dim, hidden] += c.num_layers
    shapes[hidden, queries] += c.num_layers
    experts, dense = c.arithmetic.experts, c.num_layers
    if experts is not None:
        dense = len(experts.dense_layers)
        count = (c.num_layers - dense) * (experts.count + experts.shared)
        shapes[2 * experts.width, hidden] += count
        shapes[hidden, experts.width] += count
    shapes[(1 + c.arithmetic.gated) * c.intermediate_size, hidden] += dense
    shapes[hidden, c.intermediate_size] += dense
    shapes[c.vocab_size, hidden] += 1
    return shapes


def num_weights(config: ModelConfig) -> int:
    """Return the number of weights in the matrices of a forward pass."""
    return sum(out * width * count for (out, width), count in weight_shapes(config).items())


def memory_bytes() -> int:
    """Return the machine's memory in bytes. Free memory would differ at every start."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not a POSIX system
        return 4 * 2**30
