"""What the planner keeps of the decoding rows while their set stays the same."""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np

from cbatch.core.sequence import Drafts, Sequence
from cbatch.core.state import SchedulerState


class RowCache(msgspec.Struct):
    """What is constant while the set of decoding slots is, and a bound that is seldom renewed."""

    version: int
    slots: np.ndarray
    index: np.ndarray  # the same as intp: as an index, int32 costs a conversion
    rows: slice | np.ndarray
    owners: list[Sequence]
    generations: np.ndarray
    trues: np.ndarray
    no_drafts: Drafts
    most_drafts: Drafts
    never_drafts: bool  # no row may, whatever the policy says
    all_catch_up: bool  # every row may plan catch-up wherever it may draft
    slack_tokens: int  # every row can take so many more before any comes near its end

    @classmethod
    def of(cls, state: SchedulerState) -> RowCache:
        table = state.table
        index = np.array(state.decoding, dtype=np.intp)
        slots = index.astype(np.int32)
        rows = select(slots, index)
        count = len(slots)
        no_drafts = Drafts(table.zeros[:count], table.ones[:count], 0, by_all=not count)
        most_drafts, all_catch_up = no_drafts, True
        if state.speculates:
            most_drafts = Drafts.of(table.max_lookahead[slots])
            catch_up_end, lookahead_end = table.catch_up_end[slots], table.lookahead_end[slots]
            all_catch_up = not np.count_nonzero(catch_up_end < lookahead_end)
        return cls(
            version=state.rows_version,
            slots=slots,
            index=index,
            rows=rows,
            owners=owners_of(state, state.decoding),
            generations=table.generation[index],
            trues=table.trues[:count],
            no_drafts=no_drafts,
            most_drafts=most_drafts,
            never_drafts=not most_drafts.total,
            all_catch_up=all_catch_up,
            slack_tokens=slack_of(state, rows) if count else 0,
        )


def slack_of(state: SchedulerState, rows: slice | np.ndarray) -> int:
    """The fewest tokens that any of these can take before it comes near its end."""
    table = state.table
    slack: int = min((table.lookahead_end[rows] - table.num_tokens[rows]).tolist())
    return slack


def select(slots: np.ndarray, index: np.ndarray | None = None) -> slice | np.ndarray:
    """`slots` (ascending) as a slice where they are adjacent: numpy is several times faster. Else
    as intp, which is `index` if the caller has it."""
    count = len(slots)
    if count and slots.item(-1) - slots.item(0) == count - 1:
        return slice(slots.item(0), slots.item(0) + count)
    return slots.astype(np.intp) if index is None else index


def owners_of(state: SchedulerState, slots: list[int]) -> list[Sequence]:
    return cast("list[Sequence]", [state.owners[slot] for slot in slots])
