"""Decisions under shortage of tokens and of blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.scheduler.preemption import PreemptionCandidate, decide_growth, fit_drafts

SIZE = 4


def row(slot: int, kv: int, blocks: int, **more: object) -> PreemptionCandidate:
    fields: dict[str, object] = {
        "slot": slot,
        "rank": (0.0, slot),
        "decodes": True,
        "kv_tokens": kv,
        "num_drafts": 0,
        "max_tokens": 1000,
        "blocks_held": blocks,
        "blocks_freed": blocks,
        "in_flight": False,
        "protected": False,
    }
    return PreemptionCandidate(**{**fields, **more})  # type: ignore[arg-type]


def test_the_last_in_service_order_is_the_victim() -> None:
    rows = [row(0, 4, 1), row(1, 4, 1), row(2, 3, 1)]
    growth = decide_growth(rows, 0, 0, SIZE)
    assert growth.victims == [2, 1]
    assert growth.granted_drafts == {0: 0}


@given(st.data())
def test_a_growth_decision_fits_and_some_row_runs(data: st.DataObject) -> None:
    rows = []
    for slot in range(data.draw(st.integers(1, 6))):
        kv = data.draw(st.integers(0, 12))
        blocks = max(1, -(-kv // SIZE))
        drafts = data.draw(st.integers(0, 5))
        rows.append(row(slot, kv, blocks, num_drafts=drafts, decodes=data.draw(st.booleans())))
    free = data.draw(st.integers(0, 4))
    growth = decide_growth(rows, free, 0, SIZE)
    freed = sum(r.blocks_freed for r in rows if r.slot in growth.victims)
    used = sum(
        max(0, -(-(r.kv_tokens + 1 + growth.granted_drafts[r.slot]) // SIZE) - r.blocks_held)
        for r in rows
        if r.slot in growth.granted_drafts
    )
    assert used <= free + freed
    assert not set(growth.granted_drafts) & set(growth.victims)
    if any(r.decodes for r in rows) and (free or len(rows) > 1):
        first = min((r for r in rows if r.decodes), key=lambda r: r.rank)
        is_last = first.slot == rows[-1].slot
        assert first.slot in growth.granted_drafts or is_last


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40)), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(0, 7),
)
def test_drafts_fit_the_budget(rows: list[tuple[int, int]], budget: int, first: int) -> None:
    drafts = np.array([r[0] for r in rows], dtype=np.int32)
    lag = np.array([r[1] for r in rows], dtype=np.int32)
    k, catch_up, total = fit_drafts(drafts, lag, budget, first % len(rows))
    assert total == int(k.sum() + catch_up.sum()) <= max(budget, 0)
    assert (k <= drafts).all() and (k >= 0).all() and (catch_up >= 0).all()
    assert (catch_up[k > 0] == lag[k > 0]).all()  # no row drafts before it has caught up
    needed = int(drafts.sum() + lag[drafts > 0].sum())
    assert total == min(needed, budget)  # no part of the budget is unused
