"""Plans the attention of a step: index arithmetic shared by all layers with the same window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.cpu.attention.group import Group, HeadShape
from cbatch.runtime.cpu.attention.groups import SMALL_QUERY_TOKENS, GroupBuilder, StepBuffers
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.model.config import ModelConfig

_CHUNK_TOKENS = 128  # longer queries are cut at multiples of this, so that few keys are masked
_MAX_SCORES = 1 << 24  # elements of one score buffer
_MAX_WASTE = 1 << 18  # number of padded scores that cost less than another group


class StepLayout(NamedTuple):
    """Index arrays of one step: `slots` int64 [T * kv_heads] are the rows of `kv.token_rows`
    for K and V of each (token, KV head). `groups` has the attention groups of each window."""

    slots: Tensor
    groups: dict[int | None, list[Group]]


# Maximum size of K and V of a group of pieces, as a multiple of the L2 cache. Queries of pieces are
# copied, so larger groups are faster. Of 2, 3 and 5, only 3 was never slower than a single group at
# 8 to 64 ragged rows.
_PIECES_CACHE_FACTOR = 3


class AttentionPlanner:
    """Forms groups that together cover every row of a step once.

    Pieces of a group are int64 [4, P]. The four rows are: sequence, first row in the batch, number
    of rows, context (the last row of a piece has the position context - 1).
    """

    def __init__(self, config: ModelConfig) -> None:
        self.heads = HeadShape.of(config)
        self._windows = sorted(set(config.sliding_window), key=lambda w: w or 0)
        self._builder: GroupBuilder | None = None

    def plan(self, step: StepBuffers, query_lens: I64, contexts: I64, positions: I64) -> StepLayout:
        """Return the layout of a step whose rows have the `positions` [T]."""
        longest = int(contexts.max())
        # A window that is longer than every context has no effect.
        effective = {w: w if w is not None and longest > w else None for w in self._windows}
        groups = {
            window: self._groups(step, query_lens, contexts, window)
            for window in dict.fromkeys(effective.values())
        }
        by_window = {w: groups[window] for w, window in effective.items()}
        return StepLayout(_token_slots(step, query_lens, positions), by_window)

    def _builder_for(self, kv: KVCache) -> GroupBuilder:
        if self._builder is None or self._builder.kv is not kv:
            self._builder = GroupBuilder(kv, self.heads)
        return self._builder

    def _groups(
        self, step: StepBuffers, query_lens: I64, contexts: I64, window: int | None
    ) -> list[Group]:
        builder = self._builder_for(step.kv)
        if len(contexts) < step.num_rows:
            starts = query_lens.cumsum() - query_lens
        elif self._pads_too_much(contexts):
            starts = iota(len(contexts))
        else:  # one row each
            return builder.rows(step, contexts, window)
        parts = self._partition(self._pieces(query_lens, contexts, starts), window)
        return [builder.pieces(step, part, window) for part in parts]

    def _pads_too_much(self, contexts: I64) -> bool:
        padded = int(contexts.max()) * len(contexts) - int(contexts.sum())
        return padded * self.heads.kv_heads * 8 > _MAX_WASTE

    def _pieces(self, query_lens: I64, contexts: I64, starts: I64) -> I64:
        """Return pieces; long queries are cut at multiples of a chunk of absolute positions."""
        if int(query_lens.max()) <= SMALL_QUERY_TOKENS:
            return np.stack([iota(len(starts)), starts, query_lens, contexts])
        pieces: list[tuple[int, int, int, int]] = []
        for b, (length, context, row) in enumerate(
            zip(query_lens.tolist(), contexts.tolist(), starts.tolist(), strict=True)
        ):
            if length <= SMALL_QUERY_TOKENS:
                pieces.append((b, row, length, context))
                continue
            heads = self.heads.kv_heads * self.heads.group
            chunk = max(8, min(_CHUNK_TOKENS, _MAX_SCORES // (heads * context)))
            at, end = context - length, context
            while at < end:
                stop = min(end, (at // chunk + 1) * chunk)
                pieces.append((b, row, stop - at, stop))
                row, at = row + stop - at, stop
        return np.array(pieces, dtype=np.int64).T

    def _partition(self, pieces: I64, window: int | None) -> list[I64]:
        """Put pieces of similar shape together: by their number of queries, then by context."""
        small = pieces[2] <= SMALL_QUERY_TOKENS
        parts = [pieces[:, i : i + 1] for i in np.flatnonzero(~small)]
        pieces = pieces[:, small]
        if not pieces.shape[1]:
            return parts
        query_lens, contexts = pieces[2], pieces[3]
        area = int(query_lens.max()) * int(contexts.max()) * len(contexts)
        waste = (area - int((query_lens * contexts).sum())) * self.heads.kv_heads
        if waste <= _MAX_WASTE:
            return [*parts, *self._split(pieces, window)]
        # Powers of two for queries and for contexts: padding at most doubles each.
        classes = _log2_class(query_lens) * 64 + _log2_class(contexts)
        for c in np.unique(classes):
            parts += self._split(pieces[:, classes == c], window)
        return parts

    def _split(self, pieces: I64, window: int | None) -> list[I64]:
        count = pieces.shape[1]
        assert self._builder is not None
        width = self._builder.width(count, int(pieces[3].max()), window, _PIECES_CACHE_FACTOR)
        if width >= count:
            return [pieces]
        pieces = pieces[:, np.lexsort((pieces[3], pieces[2]))]
        return [pieces[:, start : start + width] for start in range(0, count, width)]


def _token_slots(step: StepBuffers, query_lens: I64, positions: I64) -> Tensor:
    """Return the rows of `kv.token_rows` of each (token, KV head): int64 [T * kv_heads]."""
    size = step.kv.block_size
    rows, index = iota(len(query_lens)).repeat(query_lens), positions // size
    flat = step.tables[rows, index] * size + (positions - index * size)
    return torch.from_numpy((flat[:, None] + step.kv.head_base * size).reshape(-1))


def _log2_class(values: I64) -> I64:
    return np.ceil(np.log2(values)).astype(np.int64)
