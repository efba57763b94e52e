"""Prefix sharing: requests read what another one computed."""

from __future__ import annotations

import pytest

from cbatch.core.request.errors import FieldError
from tests.checking.executor import Faults
from tests.helpers import World, make_config, make_request

SYSTEM = tuple(range(500, 532))  # 8 blocks of 4
SALTS = (None, "a", "b")
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def chat(name, *question, **params):
    return make_request(name, SYSTEM + question, **({"max_tokens": 6} | params))


def admissions(world, name):
    return [a for plan in world.plans for a in plan.deltas.new_sequences if a.request_id == name]


@DEPTHS
@pytest.mark.parametrize("budget_tokens", [16, 128])
def test_a_burst_with_one_system_prompt_prefills_it_once(depth, budget_tokens):
    world = World(make_config(max_num_batched_tokens=budget_tokens), depth=depth)
    world.add(*(chat(f"r{i}", 5 * i, 1, 2, 3, 4) for i in range(6)))
    world.run()
    world.assert_reference()
    # Positions computed other than each last known token: the system prompt once, and each question
    # less its last token, which every request computes to get its first logits.
    assert world.executor.stats.prefill_tokens == len(SYSTEM) + 6 * 4
    assert world.scheduler.stats.prefix_hit_tokens == 5 * len(SYSTEM)


def test_others_pass_a_request_that_waits_for_a_prefix():
    world = World()
    world.add(chat("first", 1), chat("waits", 2), make_request("other", 4))
    world.run()
    world.assert_reference()
    admitted = [[a.request_id for a in plan.deltas.new_sequences] for plan in world.plans]
    assert admitted[:2] == [["first", "other"], ["waits"]]


@DEPTHS
def test_a_prefix_is_shared_by_requests_of_one_salt_alone(depth):
    """In any order of requests, one finds the prefix of its own salt and no other."""
    world = World(depth=depth)
    world.add(*(chat(f"{salt} {i}", i, cache_salt=salt) for i in range(2) for salt in SALTS))
    world.run()
    world.assert_reference()
    # The first request of each salt computes the system prompt and its second waits for it,
    # whatever the others do.
    assert world.executor.stats.prefill_tokens == len(SALTS) * len(SYSTEM)
    assert world.scheduler.stats.prefix_hit_tokens == len(SALTS) * len(SYSTEM)
    world.add(chat("of none of them", 1, cache_salt="b "))
    world.run()
    assert admissions(world, "of none of them")[0].kv_len_tokens == 0


@DEPTHS
@pytest.mark.parametrize("lookahead", ["off", "fixed:3"])
def test_a_salt_outlives_preemptions_and_executors(depth, lookahead):
    """Every hit is in blocks that a request of the same salt computed; the tokens do not move."""
    config = make_config(num_blocks=40, max_num_seqs=6, lookahead=lookahead)
    world = World(config, depth=depth, faults=Faults(raise_at_runs=frozenset({9, 25})))
    salts = {f"r{i}": SALTS[i % len(SALTS)] for i in range(24)}
    for i, (name, salt) in enumerate(salts.items()):
        world.add(chat(name, i % 2, cache_salt=salt, max_tokens=24))
    world.run()
    world.assert_reference()
    stats = world.scheduler.stats
    assert stats.preemptions and stats.executor_resets == 2 and stats.prefix_hit_tokens
    wrote, holders = {}, {}  # salts by block, and by slot
    for deltas in (plan.deltas for plan in world.plans):
        for a in deltas.new_sequences:
            hits = a.kv_len_tokens // config.block_size
            assert {wrote[block] for block in a.blocks[:hits].tolist()} <= {salts[a.request_id]}
            holders[a.slot] = salts[a.request_id]
            wrote |= dict.fromkeys(a.blocks[hits:].tolist(), holders[a.slot])
        for slot, block in zip(deltas.append_slots, deltas.append_blocks, strict=True):
            wrote[int(block)] = holders[int(slot)]


@pytest.mark.parametrize("salt", ["", "s" * 257])
def test_a_salt_that_is_none_is_refused(salt):
    with pytest.raises(FieldError, match="cache_salt"):
        World().add(chat("a", 1, cache_salt=salt))


@DEPTHS
@pytest.mark.parametrize("max_tokens", range(17, 21))  # the output ends at every offset of a block
def test_output_is_cached_up_to_its_last_verified_position(depth, max_tokens):
    world = World(depth=depth)
    world.add(chat("a", 1, max_tokens=max_tokens))
    world.run()
    follow_up = (*SYSTEM, 1, *world.output("a"), 9, 9, 9, 9)
    world.add(make_request("b", follow_up, max_tokens=3))
    world.run()
    world.assert_reference()
    # The KV of the last token of `a` was never computed.
    kv_len_tokens = len(SYSTEM) + 1 + max_tokens - 1
    assert admissions(world, "b")[0].kv_len_tokens == kv_len_tokens // 4 * 4
