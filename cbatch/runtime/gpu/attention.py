"""Paged attention for one model: its KV cache and the work lists that the planning kernel fills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import RecurrenceWeights
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention
from triton_kernels.attention import (
    Heads,
    Partials,
    Tile,
    WorkList,
    attention,
    balanced_partials,
    block_tokens,
    plan,
)
from triton_kernels.attention.table import INVARIANT_ROWS, SPLIT_TOKENS, arch_of, tile_for
from triton_kernels.recurrence import Sequences, recur

_INTERPRETED = Tile(rows=16, keys=16, num_warps=4, num_stages=2)
# Tiles are sized for queries of up to this many tokens; a longer query takes several tiles.
_MAX_BLOCK_TOKENS = 8
MIN_SPLIT_KEYS = 64  # smallest split of a context in balanced mode


class Tuning(NamedTuple):
    """Launch configuration for queries that fit `tile` or have up to `query_tokens` tokens. Longer
    queries use `prefill`, or this one if that is None."""

    tile: Tile
    num_programs: int  # launched programs: those that fit on the device at a time
    max_partials: int  # most partial results (block of queries, part of keys) in memory at a time
    split_tokens: int = SPLIT_TOKENS
    balanced: bool = False  # size parts by the step's load; False: batch-invariant attention
    prefill: Tuning | None = None
    query_tokens: int = 1

    @classmethod
    def of(
        cls,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int,
        kv_dtype: torch.dtype | None = None,
        *,
        numerics: str = "fast",
        query_tokens: int = 1,
    ) -> Tuning:
        """Return the tuning for a model and device from the static table. With `numerics`
        "invariant" one tile serves all queries. With "fast" one tile serves queries of up to
        `query_tokens` tokens (decode, verify), another chunks of prompts. Raises FieldError if the
        table has no tile that fits."""
        if device.type != "cuda":
            rows = max(_INTERPRETED.rows, triton.next_power_of_2(heads.group))
            tiles, processors = [_INTERPRETED._replace(rows=rows)], 4
            if numerics == "fast":
                tiles.append(_INTERPRETED._replace(rows=2 * rows))
        else:
            find = partial(tile_for, heads, dtype, page_tokens, kv_dtype=kv_dtype)
            arch = arch_of(device)
            decode_rows = INVARIANT_ROWS
            if numerics == "fast":
                decode_rows = heads.group * min(query_tokens, _MAX_BLOCK_TOKENS)
            try:
                rows = min(decode_rows, INVARIANT_ROWS)
                tiles = [find(arch=arch, rows=rows), find(arch=arch)]
            except ValueError as error:
                problem = f"{heads} of {dtype} are not supported on a GPU ({arch})"
                raise FieldError("model", problem, "use --device cpu") from error
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        if numerics != "fast":
            tile = tiles[0]
            return cls(tile, tile.programs * processors, 2 * processors)

        def balanced(tile: Tile, prefill: Tuning | None) -> Tuning:
            programs = tile.programs * processors
            partials = balanced_partials(programs, heads)
            split_tokens = max(MIN_SPLIT_KEYS, tile.keys)
            return cls(tile, programs, partials, split_tokens, True, prefill, query_tokens)

        decode, prefill = tiles[0], tiles[-1]
        return balanced(decode, None if prefill == decode else balanced(prefill, None))

    def partial_bytes(self, heads: Heads) -> int:
        """Return the bytes of memory for partial results."""
        size = self.max_partials * heads.kv_heads * self.tile.rows * (heads.head_dim + 2) * 4
        return size + (0 if self.prefill is None else self.prefill.partial_bytes(heads))

    def work_lists(
        self,
        heads: Heads,
        device: torch.device,
        *,
        max_tokens: int,
        max_sequences: int,
        windows: Iterable[int | None] = (None,),
    ) -> dict[int | None, list[tuple[WorkList, int]]]:
        """Return the work lists of short and of long queries, with program counts, by window."""
        short = max_tokens
        if self.prefill is not None:
            short = max(block_tokens(heads, self.tile), self.query_tokens)
        by_window: dict[int | None, list[tuple[WorkList, int]]] = {w: [] for w in windows}
        for tuning, queries in ((self, (1, short)), (self.prefill, (short + 1, max_tokens))):
            if tuning is None:
                continue
            partials = Partials.allocate(tuning.max_partials, heads, tuning.tile, device)
            for window, works in by_window.items():
                work = WorkList.allocate(
                    partials,
                    heads,
                    tuning.tile,
                    max_tokens=max_tokens,
                    max_sequences=max_sequences,
                    split_tokens=tuning.split_tokens,
                    balanced=tuning.num_programs if tuning.balanced else None,
                    queries=queries,
                    window=window,
                )
                works.append((work, tuning.num_programs))
        return by_window


class PagedAttention:
    """Attention for passes of up to `max_tokens` tokens.

    `tables` int32 [S, n]: the block table of each slot. `scales`: for each layer, the divisors of K
    and V in the cache; None: 1. No query sees positions before `first_key`. Queries of more than
    `short_tokens` tokens are long; they take a second launch."""

    def __init__(
        self,
        config: ModelConfig,
        kv: KVCache,
        tables: Tensor,
        max_tokens: int,
        tuning: Tuning,
        scales: Sequence[tuple[float, float]] | None = None,
        first_key: int = 0,
        state_pages: Tensor | None = None,
        state_slots: Tensor | None = None,
    ) -> None:
        """`state_pages` int32 [S, n], with recurrent layers: the page of the state at each block
        boundary. `state_slots` int32 [S]: where entries are kept; None: in row order."""
        self.scales = scales or [(1.0, 1.0)] * config.num_layers
        self._kv, self._tables, self._first_key = kv, tables, first_key
        self._mixers: list[Any] = [layer.mixer for layer in config.layers]
        self._work = tuning.work_lists(
            heads_of(config),
            tables.device,
            max_tokens=max_tokens,
            max_sequences=len(tables),
            windows={m.window: None for m in self._mixers if isinstance(m, Attention)},
        )
        works = next(iter(self._work.values()))
        self.short_tokens = works[0][0].queries[1]
        self._launched = slice(None)
        self._state_pages = state_pages
        self._sequences: Sequences | None = None
        if state_slots is None:
            state_slots = torch.arange(len(tables), dtype=torch.int32, device=tables.device)
        self._state_slots = state_slots

    @property
    def lengths(self) -> list[int]:
        """One query length for each launch variant: short, and long if there is a second tile."""
        return [1, self.short_tokens + 1][: len(next(iter(self._work.values())))]

    def plan(self, query_starts: Tensor, contexts: Tensor, longest: int | None = None) -> None:
        """Fill the work lists for all layers of the next pass. The arguments are those of
        `triton_kernels.attention.plan`, by slot. No query has more tokens than `longest`."""
        long = longest is None or longest > self.short_tokens
        self._launched = slice(None if long else 1)
        for works in self._work.values():
            for work, _ in works[self._launched]:
                plan(query_starts, contexts, work)
        if self._kv.state is not None:
            assert self._state_pages is not None
            places = self._state_pages, self._state_slots
            self._sequences = Sequences(query_starts, contexts, *places)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer, each [blocks, block_size, kv_heads, head_dim]."""
        m = self._mixers[layer]
        shape = m.kv_heads, -1, self._kv.block_size, 2, m.key_dim
        k, v = self._kv.block_rows[layer].view(shape).permute(3, 1, 2, 0, 4)
        return k, v

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        """Return the output [T, inner] of a recurrent layer, from the rows of its projection.
        Padding rows are left uninitialised."""
        state, m = self._kv.state, self._mixers[layer]
        assert state is not None and self._sequences is not None
        memory = state.layers[layer]
        return recur(rows, m, weights, memory, self._sequences, self._kv.block_size)

    def run(
        self,
        layer: int,
        window: int | None,
        q: Tensor,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [T, heads * head_dim] of queries [T, kv_heads, group,
        head_dim]. Padding rows are left uninitialised. `scale`, `soft_cap` and `sinks` are those of
        `triton_kernels.attention.attention`."""
        out = torch.empty(len(q), q[0].numel(), dtype=q.dtype, device=q.device)
        k_pages, v_pages = self.pages(layer)
        k_scale, v_scale = self.scales[layer]
        for work, num_programs in self._work[window][self._launched]:
            attention(
                q,
                k_pages,
                v_pages,
                self._tables,
                out,
                work,
                scale=scale,
                first_key=self._first_key,
                soft_cap=soft_cap,
                sinks=sinks,
                k_scale=k_scale,
                v_scale=v_scale,
                num_programs=num_programs,
                early=True,  # may overlap the q projection: the work list is already there
            )
        return out


def heads_of(config: ModelConfig) -> Heads:
    m = config.attention
    return Heads(m.kv_heads, m.group, m.key_dim)
