"""Lays out the attention of a step: index arithmetic done once, for all layers of one window."""

from __future__ import annotations

import operator

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.runtime.attention import Group, HeadShape
from cbatch.runtime.config import ModelConfig
from cbatch.runtime.groups import SMALL_QUERY_TOKENS, GroupBuilder, RowMask, StepBuffers
from cbatch.runtime.index import I64, iota
from cbatch.runtime.kv import KVCache
from cbatch.runtime.masks import MOST_POSITION

_CHUNK_TOKENS = 128  # longer queries are cut at multiples of this; none meets keys of its future
_MAX_SCORES = 1 << 24  # elements of one score buffer
_MAX_WASTE = 1 << 18  # padded scores that are cheaper than one more group


class StepLayout:
    """Index arithmetic of one step: `slots` [T * kv_heads], the rows of `kv.token_rows` that take
    K and V of each (token, KV head), and the attention groups of each window."""

    def __init__(
        self, slots: I64, groups: dict[int | None, list[Group]], device: torch.device
    ) -> None:
        self._slots = slots
        self.slots = torch.from_numpy(slots).to(device)
        self.groups = groups

    def keep(
        self,
        masks: list[RowMask],
        contexts: I64,
        tables: NDArray[np.int32],
        block_size: int,
        most_keys: int | None,
    ) -> None:
        """What `advance` needs; no context may grow beyond `most_keys`."""
        self._masks, self._contexts, self._tables = masks, contexts, tables.copy()
        self._block_size, self._most_keys = block_size, most_keys

    def advance(self, contexts: I64, tables: NDArray[np.int32]) -> bool:
        """Become the layout of the next token of every sequence, if that is what is asked for and
        each stays within its block: a few numbers change, nothing is rebuilt."""
        if len(contexts) != len(self._contexts) or (contexts != self._contexts + 1).any():
            return False
        index = (contexts - 1) // self._block_size
        if (index * self._block_size == contexts - 1).any():
            return False
        width = int(index.max()) + 1
        if not np.array_equal(tables[:, :width], self._tables[:, :width]):
            return False
        if self._most_keys is not None and int(contexts.max()) > self._most_keys:
            return False
        self._contexts = contexts
        self._slots += 1
        _open(self._masks, contexts)
        return True


class LayoutAhead:
    """Layouts of several steps in which every row goes on by one token, made at once.

    `slots` int64 [steps, B * kv_heads]. Keys of all steps are gathered in each of them; the masks
    open one more at every step.
    """

    def __init__(
        self,
        slots: I64,
        groups: dict[int | None, list[Group]],
        masks: list[RowMask],
        contexts: I64,
        device: torch.device,
    ) -> None:
        self._slots = torch.from_numpy(slots).to(device)
        self._layout = StepLayout(slots[0], groups, device)
        self._masks, self._contexts, self._steps = masks, contexts.copy(), 0

    def next(self) -> StepLayout:
        """The layout of the next step, valid until the one after."""
        self._layout.slots = self._slots[self._steps]
        self._steps += 1
        _open(self._masks, self._contexts)
        self._contexts += 1
        return self._layout


def _open(masks: list[RowMask], contexts: I64) -> None:
    """Every row of single rows sees its own key, at `contexts` - 1."""
    for mask in masks:
        if mask.stop - mask.start == 1:
            mask.values[0, :, contexts[mask.start] - 1] = 0
        else:
            rows = iota(mask.stop - mask.start)
            mask.values[rows, :, contexts[mask.start : mask.stop] - 1] = 0


# Pieces are copied together and apart: their groups may outgrow the nearest caches by so much (of
# 2, 3 and 5 the one that was never slower than a single group, at 8 to 64 ragged rows).
_PIECES_TIMES = 3


class AttentionPlanner:
    """Forms groups that together cover every row of a step once.

    Pieces of a group: int64 [4, P], in rows the sequence, its first flat row, the number of rows,
    and the context (the last row stands at position context - 1).
    """

    def __init__(self, config: ModelConfig) -> None:
        self.heads = HeadShape.of(config)
        self._windows = sorted(set(config.sliding_window), key=lambda w: w or 0)
        self._least_window = min((w for w in self._windows if w is not None), default=None)
        self._builder: GroupBuilder | None = None
        self._last: StepLayout | None = None  # one that can be advanced
        self._bound: tuple[object, ...] = ()  # the cache and the buffers of its groups

    def plan(self, step: StepBuffers, query_lens: I64, contexts: I64, positions: I64) -> StepLayout:
        """Layout of a step whose rows stand at `positions` [T]."""
        bound = (step.kv, step.fused, step.out)
        if (
            self._last is not None
            and len(contexts) == step.num_rows
            and all(map(operator.is_, self._bound, bound))
            and self._last.advance(contexts, step.tables)
        ):
            return self._last
        longest = int(contexts.max())
        masks: list[RowMask] = []
        groups = {
            window: self._groups(step, query_lens, contexts, window, masks)
            for window in self._reached(longest)
        }
        by_window = {w: groups[self._window(w, longest)] for w in self._windows}
        slots = _token_slots(step, query_lens, positions)
        device = step.kv.data.device
        layout = StepLayout(slots, by_window, device)
        self._last = None
        if masks and set(groups) == {None} and device.type == "cpu":
            layout.keep(masks, contexts, step.tables, step.kv.block_size, self._least_window)
            self._last, self._bound = layout, bound
        return layout

    def plan_ahead(self, step: StepBuffers, contexts: I64, steps: int) -> LayoutAhead | None:
        """Layouts of `steps` steps of one token a row, the first with `contexts`; the tables hold
        the blocks of all of them. None where the steps have to be planned one by one."""
        kv = step.kv
        last = contexts + (steps - 1)
        longest = int(last.max())
        if kv.data.device.type != "cpu" or self._window(self._least_window, longest) is not None:
            return None
        if self._wasteful(last, longest):
            return None
        groups, masks = self._built(kv).rows(step, contexts - 1, None, ahead=steps)
        positions = contexts - 1 + iota(steps)[:, None]
        slots = _slots_of(kv, step.tables, iota(len(contexts)), positions).reshape(steps, -1)
        by_window = dict.fromkeys(self._windows, groups)
        return LayoutAhead(slots, by_window, masks, contexts, kv.data.device)

    def _built(self, kv: KVCache) -> GroupBuilder:
        if self._builder is None or self._builder.kv is not kv:
            self._builder = GroupBuilder(kv, self.heads)
        return self._builder

    def _window(self, window: int | None, longest: int) -> int | None:
        """A window that no context has outgrown is no window."""
        return window if window is not None and longest > window else None

    def _reached(self, longest: int) -> list[int | None]:
        """The windows that hold, None among them for plain causal attention."""
        if self._least_window is None:
            return [None]
        return sorted({self._window(w, longest) for w in self._windows}, key=lambda w: w or 0)

    def _groups(
        self,
        step: StepBuffers,
        query_lens: I64,
        contexts: I64,
        window: int | None,
        masks: list[RowMask],
    ) -> list[Group]:
        """Groups of one window; where they hold single rows, `masks` gets theirs."""
        builder = self._built(step.kv)
        if len(contexts) == step.num_rows:  # one row each
            if not self._wasteful(contexts, int(contexts.max())):
                groups, found = builder.rows(step, contexts, window)
                masks += found
                return groups
            starts = iota(len(contexts))
        else:
            starts = query_lens.cumsum() - query_lens
        alone = len(contexts) == 1 and window is None
        if alone and query_lens[0] <= SMALL_QUERY_TOKENS and contexts[0] <= MOST_POSITION:
            return [builder.sequence(step, query_lens, contexts)]
        parts = self._partition(self._pieces(query_lens, contexts, starts), window)
        return [builder.pieces(step, part, window) for part in parts]

    def _wasteful(self, contexts: I64, longest: int) -> bool:
        padded = longest * len(contexts) - int(contexts.sum())
        return padded * self.heads.kv_heads * 8 > _MAX_WASTE

    def _pieces(self, query_lens: I64, contexts: I64, starts: I64) -> I64:
        """Long queries are cut at multiples of a chunk in absolute position."""
        if int(query_lens.max()) <= SMALL_QUERY_TOKENS:
            return np.stack([iota(len(starts)), starts, query_lens, contexts])
        found: list[tuple[int, int, int, int]] = []
        for b, (length, context, row) in enumerate(
            zip(query_lens.tolist(), contexts.tolist(), starts.tolist(), strict=True)
        ):
            if length <= SMALL_QUERY_TOKENS:
                found.append((b, row, length, context))
                continue
            heads = self.heads.kv_heads * self.heads.group
            chunk = max(8, min(_CHUNK_TOKENS, _MAX_SCORES // (heads * context)))
            at, end = context - length, context
            while at < end:
                stop = min(end, (at // chunk + 1) * chunk)
                found.append((b, row, stop - at, stop))
                row, at = row + stop - at, stop
        return np.array(found, dtype=np.int64).T

    def _partition(self, pieces: I64, window: int | None) -> list[I64]:
        """Pieces of like shape together: by their number of queries, then by context."""
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
        # Powers of two in both directions: at most a factor of two of padding in each.
        classes = _log2_class(query_lens) * 64 + _log2_class(contexts)
        for c in np.unique(classes):
            parts += self._split(pieces[:, classes == c], window)
        return parts

    def _split(self, pieces: I64, window: int | None) -> list[I64]:
        count = pieces.shape[1]
        assert self._builder is not None
        width = self._builder.width(count, int(pieces[3].max()), window, _PIECES_TIMES)
        if width >= count:
            return [pieces]
        pieces = pieces[:, np.lexsort((pieces[3], pieces[2]))]
        return [pieces[:, start : start + width] for start in range(0, count, width)]


def _token_slots(step: StepBuffers, query_lens: I64, positions: I64) -> I64:
    """Rows of `kv.token_rows` of each (token, KV head): [T * kv_heads]."""
    rows = iota(len(query_lens))
    if len(positions) != len(rows):
        rows = rows.repeat(query_lens)
    return _slots_of(step.kv, step.tables, rows, positions).reshape(-1)


def _slots_of(kv: KVCache, tables: NDArray[np.int32], rows: I64, positions: I64) -> I64:
    """[..., kv_heads] of `positions` [...] in the sequences `rows`."""
    size = kv.block_size
    index = positions // size
    flat = tables[rows, index] * size + (positions - index * size)
    slots: I64 = flat[..., None] + kv.head_base * size
    return slots


def _log2_class(values: I64) -> I64:
    return np.ceil(np.log2(values)).astype(np.int64)
