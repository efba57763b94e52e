"""The static table of attention tiles, never tuned at run time.

The table is `tiles.json`, which names its source; a sweep on a GPU can write another. The compile
check compiles every entry for its own target.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from triton_kernels.attention.work_items import Heads, Tile

SPLIT_TOKENS = 1024
INVARIANT_ROWS = 64  # rows of the tile that batch-invariant attention uses for all query lengths
PATH = Path(__file__).with_name("tiles.json")


class TileKey(NamedTuple):
    """Key of a tile. An entry also serves narrower heads, smaller groups, longer pages."""

    arch: str  # "sm_80", "sm_90", "sm_100" or "gfx942"
    bits: int  # bits of an element of q
    kv_bits: int  # bits of an element of the pool
    head_dim: int
    group: int
    page_tokens: int
    rows: int  # (token, head) rows that a KV head sees at once: group * query length


@cache
def entries(path: Path = PATH) -> dict[TileKey, Tile]:
    """Read the table. Raises ValueError naming an invalid entry."""
    tiles = {}
    for entry in json.loads(path.read_text())["tiles"]:
        try:
            key = TileKey(
                rows=entry["rows"], **{n: entry.pop(n) for n in TileKey._fields if n != "rows"}
            )
            tiles[key] = Tile(**entry)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: {entry}: {error}") from error
    return tiles


def arch_of(device: torch.device | str) -> str:
    """Return the architecture whose tiles `device` uses. Consumer GPUs use those of sm_80: they
    have newer instructions, but no more shared memory. The interpreter uses these tiles, too."""
    if torch.device(device).type != "cuda":
        return "sm_80"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    return {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get((major, minor), "sm_80")


def tile_for(
    heads: Heads,
    dtype: torch.dtype,
    page_tokens: int,
    *,
    arch: str,
    kv_dtype: torch.dtype | None = None,
    rows: int | None = None,
) -> Tile:
    """Return the tile for queries of `dtype` over a pool of `kv_dtype`, by default `dtype`.

    `rows` (group * query length) picks the smallest tile with at least as many rows. Without it the
    result is the largest tile, for prefill. For batch invariance all queries of a model must use
    one tile. Raises ValueError if the table has no tile that fits.
    """
    kv_bits = (kv_dtype or dtype).itemsize * 8
    fitting = [
        (key, tile)
        for key, tile in entries().items()
        if key[:3] == (arch, dtype.itemsize * 8, kv_bits)
        and key.head_dim >= heads.head_dim
        and key.group >= heads.group
        and key.page_tokens <= page_tokens
    ]
    if not fitting:
        raise ValueError(
            f"tile: none for {arch}, {dtype} over {kv_dtype or dtype}, {heads}, pages of "
            f"{page_tokens}; give a Tile, or another type or page size"
        )
    nearest = min((k.head_dim, k.group, -k.page_tokens) for k, _ in fitting)
    served = [
        (key.rows, tile)
        for key, tile in fitting
        if (key.head_dim, key.group, -key.page_tokens) == nearest
    ]
    enough = [pair for pair in served if rows is not None and pair[0] >= rows]
    return min(enough)[1] if enough else max(served)[1]


def resident_programs(tile: Tile, device: torch.device | str) -> int:
    """Return how many programs of a launch run at a time on a CUDA device."""
    return tile.programs * torch.cuda.get_device_properties(device).multi_processor_count
