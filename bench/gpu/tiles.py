"""Configurations of attention: what is shipped, and what the sweep may choose from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.grid import Shape
from bench.gpu.steps import Config
from triton_kernels.attention import Heads, Tile, arch_of, resident_programs, tile_for
from triton_kernels.attention.cases import SPLIT_TOKENS

TINY = Config(Tile(16, 16, 4, 2), 32)


def config_of(
    shape: Shape,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Config:
    """The shipped one: a tile for queries of every length, so that bits do not depend on it."""
    arch = arch_of(device)
    tile = tile_for(Heads(*shape), dtype, page_tokens, arch=arch, kv_dtype=kv_dtype)
    return Config(tile, SPLIT_TOKENS)


def programs(config: Config, device: torch.device) -> int:
    """As many as run at a time."""
    return resident_programs(config.tile, device) if device.type == "cuda" else 2


def candidates(shape: Shape, page_tokens: int) -> Iterator[Config]:
    """Likeliest first: time that runs out leaves the tail untried. The last two differ in the
    length of a split only."""
    for rows, keys, num_warps, num_stages, resident in (
        (64, 64, 4, 3, 2),
        (16, 64, 4, 3, 2),
        (64, 64, 4, 3, 1),
        (16, 64, 4, 3, 3),
        (64, 128, 8, 3, 1),
        (64, 32, 4, 3, 3),
        (32, 64, 4, 3, 2),
        (16, 128, 4, 3, 1),
        (128, 64, 8, 3, 1),
        (64, 64, 8, 3, 2),
        (16, 32, 4, 3, 4),
        (128, 128, 8, 3, 1),
        (64, 64, 4, 4, 1),
    ):
        if rows < shape.group:
            continue
        tile = Tile(rows, keys, num_warps, num_stages, resident)
        if page_tokens % keys == 0:
            yield Config(tile._replace(descriptors=True), SPLIT_TOKENS)
        yield Config(tile, SPLIT_TOKENS)
    for split_tokens in (SPLIT_TOKENS // 2, 2 * SPLIT_TOKENS):
        yield Config(Tile(64, 64, 4, 3, 2, page_tokens % 64 == 0), split_tokens)
