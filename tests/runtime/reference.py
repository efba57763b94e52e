"""Slow, plain versions of the runtime's fast computations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.kv_cache import KVCache


def slow_filter(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Filter one row by the definition, in float64: ids in the order (-logit, id), cut from the
    end."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    kept = order[:top_k]
    total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        if top_p == 1 or mass < top_p * total or not nucleus:
            nucleus.append(i)
        mass += weight[i]
    kept = [i for i in nucleus if weight[i] >= min_p * weight[order[0]]]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))]


def next_logits(model: Model, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the logits after each sequence, computed alone from an empty cache: [len(sequences),
    vocab]."""
    rows = []
    for tokens in sequences:
        count = len(tokens)
        kv = KVCache(model.config, 1, count, model.dtype, model.device)
        batch = RaggedBatch(
            torch.tensor(tokens),
            torch.arange(count),
            np.array([count], dtype=np.int32),
            np.array([count], dtype=np.int32),
            np.zeros((1, 1), dtype=np.int32),
            torch.tensor([count - 1]),
        )
        rows.append(model.forward(batch, kv)[0].double().numpy())
    return np.stack(rows)


def written_kv(model: Model, kv: KVCache, layer: int, block: int, at: int) -> torch.Tensor:
    """Return K and V of the token at place `at` of a block, as the pass of `model` wrote them: [2,
    kv_heads, head_dim]."""
    if not model.compiled:
        return kv.data[layer, :, :, block, at]
    size, dim = kv.block_size, kv.data.shape[-1]
    own = kv.data[layer, :, :, block].transpose(0, 1).transpose(1, 2).reshape(-1, 2, size * dim)
    cell = 4 // own.itemsize  # elements of K that are stored together
    keys = own[:, 0].view(-1, dim // cell, size, cell)[:, :, at].flatten(1)
    together = cell if size % cell == 0 else 1  # positions of V
    values = own[:, 1].view(-1, size // together, dim, together)
    return torch.stack([keys, values[:, at // together, :, at % together]])


def joint_law(
    model: Model,
    prompt: Sequence[int],
    length: int,
    filters: tuple[float, int, float, float],
    shape: Callable[[np.ndarray, list[int]], np.ndarray] = lambda logits, output: logits,
) -> np.ndarray:
    """Return the law of the first `length` tokens after `prompt` under temperature, top_k, top_p
    and min_p: [vocab] * length. `shape` changes the logits [vocab] that follow an output before
    that."""
    vocab = model.config.vocab_size
    law = np.ones(())
    for depth in range(length):
        prefixes = list(itertools.product(range(vocab), repeat=depth))
        logits = next_logits(model, [[*prompt, *prefix] for prefix in prefixes])
        shaped = [shape(row, list(prefix)) for row, prefix in zip(logits, prefixes, strict=True)]
        probs = np.array([slow_filter(row.tolist(), *filters) for row in shaped])
        law = law[..., None] * probs.reshape((vocab,) * (depth + 1))
    return law
