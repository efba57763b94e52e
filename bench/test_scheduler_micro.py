"""Micro-benchmark (`pytest bench --benchmark-enable`) of scheduling a step and committing it.

The result of a step is built before the timer starts, from the plan of the step before: in steady
state both have the same rows.
"""

from __future__ import annotations

import msgspec
import pytest

from bench.scheduler import build_result, cells, steady_state, step

ROUNDS = 200


@pytest.mark.parametrize(("running", "k", "enable_prefix_caching"), list(cells([8, 32, 256, 1024])))
def test_plan_and_commit(benchmark, running, k, enable_prefix_caching):
    scheduler, rng = steady_state(running, k, enable_prefix_caching)
    _, last = step(scheduler, rng)

    def prepare():
        nonlocal last
        last = msgspec.structs.replace(last, step_id=last.step_id + 1)
        return (build_result(last, rng),), {}

    def plan_and_commit(result):
        plan = scheduler.schedule(0.0)
        scheduler.update_from_output(result, 0.0)
        return plan

    plan = benchmark.pedantic(plan_and_commit, setup=prepare, rounds=ROUNDS)
    assert plan.num_rows == running
    assert (plan.query_lens == 1 + k).all()
