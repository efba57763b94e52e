"""Configurations of attention: what is used, and what the sweep may choose from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.grid import Shape
from bench.gpu.steps import Config
from bench.gpu.world import multiprocessors
from triton_kernels.attention import Tile

FLOAT32 = Config(Tile(16, 16, 4, 2), 512, 3)
TINY = Config(Tile(16, 16, 4, 2), 32, 2)
_UNTIMED = Config(Tile(64, 64, 4, 3), 1024, 2)


def config_of(shape: Shape, page_tokens: int, device: torch.device) -> Config:
    """The one that is shipped for such heads and pages."""
    return _UNTIMED


def programs(config: Config, device: torch.device) -> int:
    return config.programs_per_sm * multiprocessors(device)


def candidates(shape: Shape) -> Iterator[Config]:
    """Likeliest first: a budget that runs out leaves the tail untried. Shared memory and registers
    were looked up with the compile check: two buffers of K and V each, 227 KiB in all."""
    for rows, keys, num_warps, num_stages, per_sm in (
        (64, 64, 4, 3, 2),
        (16, 64, 4, 3, 3),
        (64, 64, 4, 3, 1),
        (16, 64, 4, 3, 4),
        (64, 128, 8, 3, 1),
        (64, 128, 4, 3, 1),
        (32, 64, 4, 3, 3),
        (16, 128, 4, 3, 2),
        (64, 32, 4, 3, 3),
        (16, 32, 4, 3, 4),
        (128, 64, 8, 3, 1),
        (64, 64, 8, 3, 2),
        (128, 128, 8, 3, 1),
        (64, 64, 4, 5, 1),
        (16, 64, 4, 5, 2),
    ):
        if rows >= shape.group:
            yield Config(Tile(rows, keys, num_warps, num_stages), 1024, per_sm)
    yield Config(Tile(64, 64, 4, 3), 512, 2)
    yield Config(Tile(64, 64, 4, 3), 2048, 2)
