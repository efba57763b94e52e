"""Order of service: preemption by recompute, what resumes first, and queue policies. No output
changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.scheduler.preemption import PreemptionCandidate, decide_growth, fit_drafts
from tests.checking.models import ModelledAcceptance
from tests.helpers import World, make_config, make_request, rows_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def admitted_names(world):
    return [a.request_id for plan in world.plans for a in plan.deltas.new_sequences]


@DEPTHS
def test_a_preempted_request_goes_before_one_that_the_policy_prefers(depth):
    world = World(make_config(num_blocks=12, queue_policy="priority"), depth=depth)
    world.add(*(make_request(f"r{i}", 8, seed=i, priority=5, max_tokens=24) for i in range(2)))
    while world.scheduler.num_running < 2:
        world.step()
    # It fits only once no preempted request waits to resume.
    world.add(make_request("urgent", 24, priority=0, max_tokens=4))
    world.run()
    world.assert_reference()
    names = admitted_names(world)
    assert world.scheduler.stats.preemptions > 0
    assert names[-1] == "urgent" and len(names) > 3


@DEPTHS
@pytest.mark.parametrize("num_blocks", [8, 10, 13, 17])
def test_the_same_victim_is_not_chosen_twice_without_having_gained_a_block(depth, num_blocks):
    config = make_config(num_blocks=num_blocks, max_model_len=32)
    world = World(config, depth=depth)
    world.add(*(make_request(f"r{i}", 3 + i, seed=i, max_tokens=24) for i in range(6)))
    world.run()
    world.assert_reference()
    assert world.scheduler.stats.preemptions > 0
    by_name = {}
    for plan in world.plans:
        for a in plan.deltas.new_sequences:
            by_name.setdefault(a.request_id, []).append(len(a.tokens))
    for lengths in by_name.values():
        # The first admission is no preemption. From the second on each must have gained a block.
        for earlier, later in itertools.pairwise(lengths[1:]):
            assert later // 4 > earlier // 4, by_name


def test_speculation_never_causes_a_preemption():
    # Both sequences fit to their ends, but not with eight drafts each in addition.
    config = make_config(num_blocks=14, lookahead="fixed:8")
    world = World(config)
    world.add(*(make_request(f"r{i}", 8, seed=i, max_tokens=20) for i in range(2)))
    world.run()
    world.assert_reference()
    assert world.scheduler.stats.preemptions == 0
    assert world.executor.stats.drafted_tokens > 0


def test_the_estimator_survives_preemption():
    """A request whose drafts all fail gets few drafts when it resumes, too."""
    world = World(make_config(num_blocks=12, lookahead="ema:4"), acceptance=ModelledAcceptance(0.0))
    world.add(*(make_request(f"r{i}", 6, seed=i, max_tokens=24) for i in range(4)))
    world.run()
    world.assert_reference()
    resumed = {}  # drafts since the last admission, by request, recorded by output length
    for plan in world.plans:
        for a in plan.deltas.new_sequences:
            resumed[a.request_id] = (len(a.tokens) - a.num_prompt_tokens, [])
        for name, row in rows_of(world, plan).items():
            resumed[name][1].append(row["num_drafts"])
    late = [drafts for output_tokens, drafts in resumed.values() if output_tokens >= 12]
    assert late and all(max(drafts) <= 1 for drafts in late), resumed


@pytest.mark.parametrize(("prompt_tokens", "enters"), [(4, True), (5, False), (8, False)])
def test_a_request_enters_only_if_its_prompt_and_a_decode_reserve_fit(prompt_tokens, enters):
    world = World(make_config(num_blocks=8, decode_reserve_tokens=8))
    world.add(make_request("first", 12, max_tokens=30))  # holds 5 of the 8 blocks
    world.step()
    world.add(make_request("second", prompt_tokens, max_tokens=30))
    world.step()
    assert admitted_names(world) == ["first", "second"][: 1 + enters]
    world.run()
    world.assert_reference()


# --- decisions ------------------------------------------------------------------------------------

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


# --- queue policies -------------------------------------------------------------------------------


def served(world):
    return [a.request_id for plan in world.plans for a in plan.deltas.new_sequences]


def one_at_a_time(policy, **settings):
    return World(make_config(max_num_seqs=1, queue_policy=policy, **settings))


@pytest.mark.parametrize(
    ("policy", "arrivals", "order"),
    [
        ("fcfs", {"a": (20, 3, 0), "b": (5, 3, -5), "c": (9, 1, 2)}, "abc"),
        ("priority", {"c": (8, 3, 2), "a": (8, 3, 0), "d": (8, 3, 2), "b": (8, 3, 1)}, "abcd"),
        ("shortest", {"c": (30, 3, 0), "a": (5, 3, 0), "d": (4, 40, 0), "b": (6, 9, 0)}, "abcd"),
    ],
)
def test_who_is_served_first(policy, arrivals, order):
    """Order by arrival; by level and then arrival; by prompt and output together."""
    world = one_at_a_time(policy)
    for name, (prompt_tokens, max_tokens, priority) in arrivals.items():
        world.add(make_request(name, prompt_tokens, max_tokens=max_tokens, priority=priority))
    world.run()
    assert served(world) == list(order)


def arrivals_until_served(world, favoured, patient, limit=200):
    """Keep a favoured request waiting at all times; return how many of them ran before
    `patient`."""
    world.add(favoured(0), patient)
    for i in range(1, limit):
        world.add(favoured(i))
        while len(world.finished) < i:
            world.step()
        if patient.request_id in served(world):
            return i
    return None


@pytest.mark.parametrize(
    ("policy", "ageing_per_s", "favoured", "patient"),
    [
        ("priority", 20.0, {"priority": 0}, {"priority": 5}),
        ("shortest", 200.0, {"max_tokens": 3}, {"max_tokens": 60}),
        ("shortest", None, {"max_tokens": 3}, {"max_tokens": 20}),  # the default ages
    ],
)
def test_none_starves_under_ageing(policy, ageing_per_s, favoured, patient):
    world = one_at_a_time(policy, ageing_per_s=ageing_per_s)
    count = arrivals_until_served(
        world,
        lambda i: make_request(f"f{i}", 4, **({"max_tokens": 3} | favoured)),
        make_request("patient", 4, **patient),
    )
    assert count is not None and count > 2  # it waited, but not for ever
    world.run()
    world.assert_reference()


def test_without_ageing_priority_is_strict():
    world = one_at_a_time("priority", ageing_per_s=0.0)
    count = arrivals_until_served(
        world,
        lambda i: make_request(f"f{i}", 4, max_tokens=2),
        make_request("patient", 4, priority=1, max_tokens=2),
        limit=100,
    )
    assert count is None
    world.run()
    world.assert_reference()


def test_the_first_that_does_not_fit_holds_back_those_after_it():
    world = World(make_config(num_blocks=16, max_model_len=64))
    world.add(make_request("running", 32, max_tokens=20))
    world.step()
    world.add(make_request("big", 40, max_tokens=4), make_request("small", 4, max_tokens=4))
    world.run()
    world.assert_reference()
    assert served(world) == ["running", "big", "small"]
