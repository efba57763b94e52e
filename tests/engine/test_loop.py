from __future__ import annotations

import pytest

from cbatch.core.request.request import FinishReason
from cbatch.engine.loop import MAX_CONSECUTIVE_FAULTS, StepLoop
from tests.checking.executor import Faults
from tests.checking.kv import ContractBreachError
from tests.helpers import World, make_config, make_request

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def crowd(count=6, **params):
    settings = {"max_tokens": 12} | params
    return [make_request(f"r{i}", 5 + 3 * i, seed=i, **settings) for i in range(count)]


@DEPTHS
def test_an_idle_loop_returns_none(depth):
    world = World(depth=depth)
    assert world.step() is None
    world.add(make_request("a", max_tokens=2))
    world.run()
    assert world.step() is None
    world.add(make_request("b", max_tokens=2))
    assert world.step() is not None


class CountingExecutor:
    """An executor that counts the plans between `submit` and `wait`."""

    def __init__(self, inner):
        self._inner, self.check = inner, inner.check
        self.in_flight = []

    def submit(self, plan):
        self._inner.submit(plan)
        self.in_flight.append(self.in_flight[-1] + 1 if self.in_flight else 1)

    def wait(self):
        self.in_flight.append(self.in_flight[-1] - 1)
        return self._inner.wait()

    def reset(self):
        self._inner.reset()


def test_depth_1_submits_the_next_plan_before_it_waits():
    world = World(depth=1)
    counting = CountingExecutor(world.executor)
    world.loop = StepLoop(world.scheduler, counting, clock=world.clock, depth=1)
    world.add(*crowd(3))
    world.run()
    world.assert_reference()
    assert counting.in_flight.count(2) > 10
    assert counting.in_flight[-1] == 0


@DEPTHS
def test_a_request_that_always_fails_ends_and_others_continue(depth):
    world = World(depth=depth, faults=Faults(raise_with_requests=frozenset({"bad"})))
    world.add(*crowd(3))
    for _ in range(3):
        world.step()
    long = make_request("long", 40, max_tokens=20)
    world.add(make_request("bad"), long)
    # Requests that share its steps fail with it, and no others.
    world.run()
    assert world.finished["bad"].reason is FinishReason.ERROR
    assert "executor failed 3 times in a row" in world.finished["bad"].message
    assert world.executor.stats.num_resets == MAX_CONSECUTIVE_FAULTS
    later = [make_request(f"late{i}", max_tokens=6) for i in range(3)]
    world.add(*later)
    world.run()
    world.assert_reference("late0", "late1", "late2")


def test_only_requests_common_to_all_failing_steps_are_suspects():
    world = World(
        make_config(max_num_seqs=1), faults=Faults(raise_with_requests=frozenset({"bad"}))
    )
    world.add(*crowd(2), make_request("bad"), make_request("last", max_tokens=4))
    world.run()
    assert world.finished["bad"].reason is FinishReason.ERROR
    world.assert_reference("r0", "r1", "last")


@DEPTHS
def test_all_requests_end_if_the_executor_always_fails(depth):
    world = World(depth=depth, faults=Faults(raise_at_runs=frozenset(range(10_000))))
    world.add(*crowd(12))
    world.run(max_steps=100)
    assert {end.reason for end in world.finished.values()} == {FinishReason.ERROR}


@DEPTHS
def test_a_non_finite_row_ends_only_its_own_request(depth):
    config = make_config(lookahead="fixed:3", num_blocks=24, max_num_seqs=3)
    world = World(config, depth=depth, faults=Faults(non_finite_at={"r1": 5}))
    world.add(*crowd(8))
    world.run()
    end = world.finished["r1"]
    assert end.reason is FinishReason.ERROR and end.message
    expected, _ = world.reference("r1")
    assert end.output.tolist() == expected[: len(end.output)] and len(end.output) <= 5
    world.assert_reference(*(f"r{i}" for i in range(8) if i != 1))
    zeroed = [block for plan in world.plans for block in plan.deltas.zeroed_blocks.tolist()]
    assert zeroed and len(set(zeroed)) == len(zeroed)  # before their next use, and only then


@DEPTHS
def test_a_bug_of_the_scheduler_is_not_handled_as_a_fault(depth):
    world = World(depth=depth)
    world.add(make_request("a"))
    world.step()
    world.executor._target_kv.clear()  # as if the blocks belonged to another row
    with pytest.raises(ContractBreachError):
        world.step()
