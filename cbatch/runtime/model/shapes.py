"""Shapes of a model's products."""

from __future__ import annotations

from collections import Counter

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Experts


def weight_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """Return [out, in] of the fused products, and the number of each in a forward pass."""
    hidden = config.hidden_size
    shapes: Counter[tuple[int, int]] = Counter()
    for layer in config.layers:
        m, f, injection = layer.mixer, layer.feed_forward, layer.injection
        shapes[m.row_width, hidden] += 1
        shapes[hidden, m.heads * m.value_dim] += 1
        if isinstance(f, Experts):
            shapes[2 * f.inner, hidden] += f.count + f.shared
            shapes[hidden, f.inner] += f.count + f.shared
        elif f is not None:
            shapes[(1 + f.gated) * f.inner, hidden] += 1
            shapes[hidden, f.inner] += 1
        if injection is not None:
            shapes[injection.inner, hidden] += 1
            shapes[hidden, injection.inner] += 1
    if config.layer_inputs is not None:
        shapes[config.num_layers * config.layer_inputs.width, hidden] += 1
    shapes[config.vocab_size, hidden] += 1
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
