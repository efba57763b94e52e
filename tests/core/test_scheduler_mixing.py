"""Tokens per step are data: chunks, decodes and verifications share a step and its budget."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import World, make_config, make_request, rows_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
def test_chunks_of_a_long_prompt_mix_with_decodes(depth):
    world = World(make_config(max_num_batched_tokens=16, lookahead="fixed:2"), depth=depth)
    world.add(make_request("short", 6, max_tokens=30))
    world.step()
    world.add(make_request("long", 90, max_tokens=5))
    world.run()
    world.assert_reference()
    mixed = [
        rows
        for rows in (rows_of(world, plan) for plan in world.plans)
        if len(rows) == 2 and not rows["long"]["wants_logits"]
    ]
    assert len(mixed) >= 4
    assert any(rows["short"]["num_drafts"] for rows in mixed)
    assert any(rows["long"]["query_len"] > 1 for rows in mixed)


@DEPTHS
@pytest.mark.parametrize("lookahead", ["off", "fixed:4", "ema:8"])
def test_no_step_passes_its_budget(depth, lookahead):
    config = make_config(max_num_batched_tokens=12, lookahead=lookahead)
    world = World(config, depth=depth)
    world.add(*(make_request(f"r{i}", 4 + 5 * i, max_tokens=15, seed=i) for i in range(8)))
    world.run()
    world.assert_reference()
    spent = [int(plan.query_lens.sum() + plan.catch_up.sum()) for plan in world.plans]
    assert max(spent) <= 12
    assert spent.count(12) >= 3  # the budget was often the limit


@DEPTHS
def test_every_decoding_row_gets_its_token_during_a_prefill(depth):
    world = World(make_config(max_num_batched_tokens=8), depth=depth)
    world.add(*(make_request(f"d{i}", 3, max_tokens=40) for i in range(4)))
    for _ in range(8):
        world.step()
    first = len(world.plans)
    world.add(make_request("long", 60, max_tokens=2))
    for _ in range(10):
        world.step()
    for plan in world.plans[first:]:
        rows = rows_of(world, plan)
        assert {f"d{i}" for i in range(4)} <= set(rows)


@DEPTHS
@pytest.mark.parametrize("lookahead", ["off", "fixed:6"])
def test_every_array_of_a_plan_has_the_type_that_the_contract_names(depth, lookahead):
    world = World(make_config(max_num_batched_tokens=20, lookahead=lookahead), depth=depth)
    world.add(*(make_request(f"r{i}", 6 + 9 * i, max_tokens=30) for i in range(3)))
    world.run()
    assert sum(len(plan.deltas.append_blocks) for plan in world.plans) > 10
    for plan in world.plans:
        parts = [plan, plan.deltas, *plan.deltas.new_sequences]
        fields = [(name, getattr(part, name)) for part in parts for name in part.__struct_fields__]
        types = {name: array.dtype for name, array in fields if isinstance(array, np.ndarray)}
        assert types.pop("wants_logits") == np.bool_
        assert set(types.values()) == {np.dtype(np.int32)}, types


def test_depth_1_plans_while_a_step_runs_and_wastes_at_most_one_row_each():
    serial, overlapped = World(depth=0), World(depth=1)
    for world in (serial, overlapped):
        world.add(*(make_request(f"r{i}", 6, max_tokens=5 + i) for i in range(5)))
        world.run()
        world.assert_reference()
    rows = [sum(plan.num_rows for plan in world.plans) for world in (serial, overlapped)]
    assert rows[0] <= rows[1] <= rows[0] + 5
