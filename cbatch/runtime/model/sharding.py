"""The shard of a checkpoint's tensors that one rank loads (Megatron-LM, arXiv:1909.08053).

Attention heads and the MLP's inner columns are divided among the ranks. So the projections before
them are split by rows, and the projections after them by columns. The LM head is split by rows.
Embedding and norms are whole on every rank.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.gguf_file import GgufTensor
from cbatch.runtime.model.shapes import head_rows
from cbatch.runtime.model.weight_files import WeightSource

FIELD = "tensor_parallel_size"
HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config of one of `size` ranks. Vocabulary and hidden size stay those of the whole
    model, and the LM head is untied. Raises FieldError if heads or columns cannot be divided."""
    if not config.plain:
        problem = f"our own pass cannot shard {config.family}"
        raise FieldError(FIELD, problem, "leave it out, or use model_impl transformers")
    m, inner = config.attention, config.widest_inner
    for name, count in (
        ("num_key_value_heads", m.kv_heads),
        ("num_attention_heads", m.heads),
        ("intermediate_size", inner),
    ):
        if count % size:
            problem = f"{size} does not divide the model's {name}, {count}"
            raise FieldError(FIELD, problem, _remedy(m.kv_heads, m.heads, inner))
    config = config.with_mixers(heads=m.heads // size, kv_heads=m.kv_heads // size)
    config = config.with_feed_forwards(inner=inner // size)
    return structs.replace(config, tie_embeddings=False)


def _remedy(*counts: int) -> str:
    fitting = [n for n in range(2, counts[0] + 1) if not any(c % n for c in counts)]
    if not fitting:
        return "leave it out"
    return f"use {' or '.join(map(str, fitting))}, or leave it out"


class ShardedWeights(WeightSource):
    """The tensors of rank `rank` of `size`, requested in the shapes of that rank's config."""

    def __init__(self, whole: WeightSource, config: ModelConfig, rank: int, size: int) -> None:
        """`config` is the whole model's."""
        self._whole, self._config, self._rank, self._size = whole, config, rank, size

    def scalar(self, name: str) -> float | None:
        return self._whole.scalar(name)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == HEAD:
            rows = self._whole.get(self._head, (self._config.vocab_size, *shape[1:]))
            part = rows[self._rank * shape[0] :][: shape[0]]
            return F.pad(part, (0, 0, 0, shape[0] - len(part)))
        along = _split_along(name)
        if along is None:
            return self._whole.get(name, shape)
        if along == len(shape):  # a bias after a row-parallel product: only rank 0 adds it
            bias = self._whole.get(name, shape)
            return bias if self._rank == 0 else torch.zeros_like(bias)
        count = shape[along]
        whole = list(shape)
        whole[along] = count * self._size
        # A copy: a view would keep the whole tensor in memory.
        return self._whole.get(name, tuple(whole)).narrow(along, self._rank * count, count).clone()

    def blocks(self, name: str) -> GgufTensor | None:
        whole = self._whole.blocks(self._head if name == HEAD else name)
        if whole is None:
            return None
        out, columns = whole.shape
        if name == HEAD:
            count = head_rows(self._config, self._size)
            rows = whole.rows[self._rank * count :][:count]
            rows = np.pad(rows, ((0, count - len(rows)), (0, 0)))
            return whole._replace(shape=(count, columns), raw=rows.reshape(-1))
        along = _split_along(name)
        if along is None:
            return whole
        if along == 0:
            rows = np.split(whole.rows, self._size)[self._rank]
            return whole._replace(shape=(out // self._size, columns), raw=rows.reshape(-1))
        width, per_block = columns // self._size, whole.type.elements
        if width % per_block:
            raise FieldError(
                FIELD,
                f"{self._size} gives {width} columns of {name} to a rank, which cuts its blocks "
                f"({whole.type.name}, {per_block} columns each)",
                "use a smaller one, or dtype bfloat16, which widens quantised weights",
            )
        rows = np.split(whole.rows, self._size, axis=1)[self._rank]
        return whole._replace(shape=(out, width), raw=rows.reshape(-1))

    @property
    def _head(self) -> str:
        return _EMBEDDING if self._config.tie_embeddings else HEAD


def _split_along(name: str) -> int | None:
    """Return the dimension along which a tensor is split, or None. For the bias of a matrix split
    by columns it is 1, a dimension which the bias does not have."""
    module = name.split(".")[-2]
    return 0 if module in _BY_ROWS else 1 if module in _BY_COLUMNS else None
