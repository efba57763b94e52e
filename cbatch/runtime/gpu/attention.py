"""Attention of one model's passes: its KV pool, and the work lists that the device plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.kv_cache import KVCache
from triton_kernels.attention import Heads, Partials, Tile, WorkList, attention, plan
from triton_kernels.attention.cases import SPLIT_TOKENS
from triton_kernels.attention.table import arch_of, resident_programs, tile_for

_INTERPRETED = Tile(rows=16, keys=16, num_warps=4, num_stages=2)


class Tuning(NamedTuple):
    """One tile for queries of every length: the bits of a row do not depend on its neighbours."""

    tile: Tile
    num_programs: int  # as many as fit on the device at a time
    most_partials: int  # (block of queries, split of keys) pairs whose results may wait
    split_tokens: int = SPLIT_TOKENS

    @classmethod
    def of(
        cls,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> Tuning:
        """From the static table, as `bench.gpu` tests and times it: the tile that serves prefill,
        for a verification reads as much with it. Raises FieldError if nothing there serves."""
        if device.type != "cuda":
            rows = max(_INTERPRETED.rows, triton.next_power_of_2(heads.group))
            return cls(_INTERPRETED._replace(rows=rows), num_programs=4, most_partials=16)
        arch = arch_of(device)
        try:
            tile = tile_for(heads, dtype, page_tokens, arch=arch, kv_dtype=kv_dtype)
        except ValueError as error:
            problem = f"{heads} of {dtype} are not served on a GPU ({arch})"
            raise FieldError("model", problem, "use --device cpu") from error
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(tile, resident_programs(tile, device), 2 * processors)


class PagedAttention:
    """Of passes with up to `most_tokens` tokens. `tables` int32 [S, n]: the blocks of each slot.
    `scales`, by layer: K and V are held divided by them; None: as they are."""

    def __init__(
        self,
        config: ModelConfig,
        kv: KVCache,
        tables: Tensor,
        most_tokens: int,
        tuning: Tuning,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.scales = scales or [(1.0, 1.0)] * config.num_layers
        self._kv, self._tables, self._tuning = kv, tables, tuning
        self._scale = 1.0 / math.sqrt(config.head_dim)
        heads = heads_of(config)
        device = tables.device
        partials = Partials.allocate(tuning.most_partials, heads, tuning.tile, device)
        self._work = {
            window: WorkList.allocate(
                partials,
                heads,
                tuning.tile,
                most_tokens=most_tokens,
                most_sequences=len(tables),
                split_tokens=tuning.split_tokens,
                window=window,
            )
            for window in dict.fromkeys(config.sliding_window)
        }

    def plan(self, query_starts: Tensor, contexts: Tensor) -> None:
        """For all layers of the next pass; arguments as those of `attention.plan`, by slot."""
        for work in self._work.values():
            plan(query_starts, contexts, work)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [blocks, block_size, kv_heads, head_dim] each."""
        k, v = self._kv.data[layer].permute(0, 2, 3, 1, 4)
        return k, v

    def run(
        self,
        layer: int,
        window: int | None,
        q: Tensor,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """[T, heads * head_dim] of queries [T, kv_heads, group, head_dim]; rows that belong to no
        slot are left as they were in memory. `scale` of scores is 1 / sqrt(head_dim), unless given;
        `soft_cap` as `attention` has it."""
        out = torch.empty(len(q), q[0].numel(), dtype=q.dtype, device=q.device)
        k_pages, v_pages = self.pages(layer)
        k_scale, v_scale = self.scales[layer]
        attention(
            q,
            k_pages,
            v_pages,
            self._tables,
            out,
            self._work[window],
            scale=self._scale if scale is None else scale,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            num_programs=self._tuning.num_programs,
        )
        return out


def heads_of(config: ModelConfig) -> Heads:
    return Heads(config.num_kv_heads, config.group_size, config.head_dim)
