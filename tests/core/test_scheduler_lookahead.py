"""Tokens of a step: numbers of drafts, their reservations, how the draft's KV keeps up, and that
chunks, decodes and verifications share a step and its budget."""

from __future__ import annotations

import numpy as np
import pytest

from cbatch.core.speculation.config import LookaheadConfig
from tests.checking.models import ModelledAcceptance, ScriptedAcceptance
from tests.helpers import World, make_config, make_request, rows_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PROMPT = tuple(range(300, 316))


def rows(world, name):
    by_plan = (rows_of(world, plan).get(name) for plan in world.plans)
    return [row for row in by_plan if row is not None and row["wants_logits"]]


def one(lookahead, acceptance, depth=0, max_tokens=30, **settings):
    world = World(make_config(lookahead=lookahead, **settings), acceptance=acceptance, depth=depth)
    world.add(make_request("a", 6, max_tokens=max_tokens))
    world.run()
    world.assert_reference()
    return world


def test_fixed_drafts_k_and_ends_within_the_limit():
    world = one("fixed:4", ModelledAcceptance(1.0))
    drafts = [row["num_drafts"] for row in rows(world, "a")]
    assert drafts[0] == 0  # the prompt's last chunk
    assert drafts[1:] == [4, 4, 4, 4, 4, 3]  # 1 + 5 * 5 + 4 = 30


def test_a_request_may_cap_its_own_lookahead():
    world = World(make_config(lookahead="fixed:4"))
    world.add(
        make_request("none", 6, max_lookahead=0, max_tokens=12),
        make_request("two", 6, max_lookahead=2, max_tokens=12),
        make_request("all", 6, max_lookahead=9, max_tokens=12),
    )
    world.run()
    world.assert_reference()
    largest = {name: max(row["num_drafts"] for row in rows(world, name)) for name in world.requests}
    assert largest == {"none": 0, "two": 2, "all": 4}


def test_after_a_full_acceptance_the_draft_lags_one_token_and_after_a_rejection_none():
    world = one("fixed:3", ScriptedAcceptance({"a": [3, 3, 1, 0, 2, 3, 0]}))
    lags = [row["catch_up"] for row in rows(world, "a") if row["num_drafts"] == 3]
    assert lags[0] == 6  # the first drafting step ingests the whole prompt
    assert lags[1:7] == [1, 1, 0, 0, 0, 1]


@DEPTHS
def test_k_goes_to_zero_and_comes_back_with_the_draft_caught_up(depth):
    """Trap 1 (k = 0 starves the draft's KV), trap 4 (k = 0 absorbs). `ema`: a run of rejections
    turns drafting off, the drift to the prior turns it on again."""
    script = ScriptedAcceptance({"a": [3] * 3 + [0] * 20 + [3]})
    lookahead = LookaheadConfig(policy="ema", k=3, min_survival=0.35, idle_drift=0.98)
    config = make_config(
        lookahead=lookahead, max_model_len=256, num_blocks=80, draft_context_tokens=256
    )
    world = World(config, acceptance=script, depth=depth)
    world.add(make_request("a", 6, max_tokens=200))
    world.run()
    world.assert_reference()
    drafts = [row["num_drafts"] for row in rows(world, "a")][1:]
    off = drafts.index(0)
    assert drafts[0] == 3 and 3 in drafts[:off]
    back = next(i for i in range(off, len(drafts)) if drafts[i] > 0)
    resumed = rows(world, "a")[1 + back]
    assert resumed["catch_up"] >= back - off  # every token that was not drafted for
    assert back - off >= 2 and 3 in drafts[back:]


@DEPTHS
def test_a_prefix_hit_on_blocks_that_were_never_drafted(depth):
    world = World(make_config(lookahead="fixed:2"), depth=depth)
    world.add(make_request("cold", (*PROMPT, 1), max_lookahead=0, max_tokens=6))
    world.run()
    for name in ("first", "second"):
        world.add(make_request(name, (*PROMPT, 1), max_tokens=12, seed=5))
        world.run()
    world.assert_reference()
    admitted = {a.request_id: a for plan in world.plans for a in plan.deltas.new_sequences}
    first, second = admitted["first"], admitted["second"]
    assert (first.kv_len_tokens, first.draft_kv_len_tokens) == (16, 0)
    assert rows(world, "first")[1]["catch_up"] >= 17
    # `first` caught up inside the shared blocks, so `second` finds the draft's KV there too.
    assert (second.kv_len_tokens, second.draft_kv_len_tokens) == (16, 16)
    assert world.output("first") == world.output("second")


def test_a_catch_up_longer_than_the_budget_is_sliced():
    config = make_config(lookahead="fixed:2", max_num_batched_tokens=10)
    world = World(config, acceptance=ModelledAcceptance(0.6))
    world.add(make_request("a", 40, max_tokens=30))
    world.run()
    world.assert_reference()
    slices = [row for row in rows(world, "a") if row["catch_up"] and not row["num_drafts"]]
    assert len(slices) >= 3 and all(row["catch_up"] <= 9 for row in slices)
    assert world.executor.stats.drafted_tokens > 10


def prompt_steps(**settings: float) -> int:
    """Return the steps until a prompt is in KV, while another row's draft has a prompt to catch up
    with."""
    sizes = {"max_num_batched_tokens": 32, "num_blocks": 256, "prompt_share": 1.0}
    config = make_config(lookahead="fixed:2", **(sizes | settings))
    world = World(config, acceptance=ModelledAcceptance(0.5))
    world.add(make_request("a", 100, max_tokens=20))
    while not world.shown.get("a"):
        world.step()
    world.add(make_request("b", 100, seed=1, max_tokens=20))
    steps = 0
    while not world.shown.get("b"):
        world.step()
        steps += 1
    world.run()
    world.assert_reference()
    return steps


def test_a_catch_up_leaves_prompts_what_it_does_not_cost():
    assert prompt_steps(catch_up_price=0.1) < prompt_steps() == prompt_steps(catch_up_price=1.0)


@DEPTHS
def test_drafts_do_not_starve_a_row_when_the_budget_is_short(depth):
    config = make_config(lookahead="fixed:4", max_num_batched_tokens=24)
    world = World(config, depth=depth, acceptance=ModelledAcceptance(0.8))
    world.add(*(make_request(f"r{i}", 4, seed=i, max_tokens=80) for i in range(8)))
    while not world.finished:
        world.step()
    drafted = [sum(r["num_drafts"] for r in rows(world, f"r{i}")) for i in range(8)]
    world.run()
    world.assert_reference()
    assert min(drafted) > 0.1 * max(drafted), drafted


# --- mixed steps ----------------------------------------------------------------------------------


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
