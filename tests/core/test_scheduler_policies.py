from __future__ import annotations

import pytest

from tests.helpers import World, make_config, make_request


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
