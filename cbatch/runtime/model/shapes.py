"""Shapes of a model's products, and their arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cbatch.runtime.model.config import ModelConfig


class Numerics(NamedTuple):
    """The arithmetic of products: `mode` is "invariant" or "fast"; `may_pack`: there is memory for
    packed fp32 weights."""

    mode: str
    may_pack: bool


def weight_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """Return [out, in] of the fused products, and the number of each in a forward pass."""
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


def head_rows(config: ModelConfig, size: int) -> int:
    """Return the number of logits per rank. Together the ranks may have more rows of the LM head
    than the vocabulary; the additional rows are 0."""
    return columns_per_rank(config.vocab_size, size)


def columns_per_rank(count: int, size: int) -> int:
    return -(-count // size)
