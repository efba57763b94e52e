"""Pairs of tiny models without a checkpoint: a target, and a draft that sometimes agrees with
it."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.model.config import ModelConfig, RopeConfig
from cbatch.runtime.model.shapes import Numerics
from cbatch.runtime.model.weight_files import WeightSource

VOCAB = 64


def tiny_config(vocab_size: int = VOCAB, context: int = 256) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_tokens=context,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        sliding_window=(None, None),
        tie_embeddings=False,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


class NoisyWeights(WeightSource):
    """Random weights of order 1 / sqrt(fan-in), each moved by `noise` of its own size.

    A row of embedding or head depends on its token alone, so models of different vocabulary sizes
    agree on the tokens they share. The embedding of the token `poison` is NaN.
    """

    def __init__(self, seed: int, noise: float = 0.0, poison: int | None = None) -> None:
        self.seed, self.noise, self.poison = seed, noise, poison

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        scale = 2.0 if "lm_head" in name else shape[-1] ** 0.5 * 1.5
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
        weight = self._normal(shape, generator)
        if self.noise:
            generator.manual_seed(self.seed + 1 + zlib.crc32(name.encode()))
            weight = weight + self.noise * self._normal(shape, generator)
        if self.poison is not None and "embed" in name:
            weight[self.poison] = torch.nan
        return weight * (scale / shape[-1] if "lm_head" not in name else scale / shape[-1] ** 0.5)

    @staticmethod
    def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        rows = [torch.randn(shape[1:], generator=generator) for _ in range(shape[0])]
        return torch.stack(rows)


def tiny_model(
    *,
    seed: int = 1,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB,
    context: int = 256,
    poison: int | None = None,
) -> Model:
    config = tiny_config(vocab_size, context)
    source = NoisyWeights(seed, noise, poison)
    numerics = Numerics(mode="invariant", may_pack=True)
    return Model(config, source, dtype, numerics)
