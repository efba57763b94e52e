"""A step that is planned as the one before decides what the long way decides: each load is served
with that shortcut and without it, and plans, commits and endings are compared byte by byte."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cbatch.core.planner import Planner
from cbatch.engine.steplog import encode_array
from tests.helpers import World, make_config, make_request

LOADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks of one token": {"block_size_tokens": 1, "num_blocks": 200},
    "preempting": {"num_blocks": 14},
    "stops": {"eos_ids": (3, 9, 11)},
    "fixed": {"lookahead": "fixed:3"},
    "ema": {"lookahead": "ema:4", "num_blocks": 20},
    "goodput": {"lookahead": "goodput:4"},
    "no prefix cache": {"prefix_cache": False, "num_blocks": 20},
}


def serve(seed: int, depth: int, config: dict[str, Any]) -> World:
    """A few requests at a time, and long quiet stretches between them. Where the load speculates,
    every second lot opts out."""
    rng = np.random.default_rng(seed)
    world = World(make_config(max_model_tokens=56, **config), depth=depth)
    for lot in range(6):
        params = {"max_lookahead": 0} if lot % 2 else {}
        for i in range(rng.integers(1, 6)):
            prompt = (*range(rng.choice([0, 8, 13])), *rng.integers(0, 1000, rng.integers(1, 12)))
            name, most = f"{lot}.{i}", int(rng.integers(1, 40))
            tokens = tuple(int(token) for token in prompt)
            world.add(make_request(name, tokens, seed=i, max_tokens=most, **params))
        for _ in range(rng.integers(2, 40)):
            if world.scheduler.has_work:
                world.step()
        if lot in (3, 5):
            world.scheduler.cancel(f"{lot}.0", world.clock())
            world._end(world.scheduler.take_finished())
    world.run()
    return world


def told(world: World) -> bytes:
    """Everything that executor and caller were told, and the pool at the end."""
    commits = [
        [getattr(commit, field) for field in commit.__struct_fields__ if field != "owners"]
        for commit in world.commits
    ]
    pool = world.scheduler.state.pool
    everything = world.plans, commits, world.finished, world.scheduler.stats, pool.allocate(9)
    return msgspec.msgpack.encode(everything, enc_hook=encode_array)


def count_shortcuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    go_on = Planner._go_on

    def counted(planner: Planner, num_steps: int) -> Any:
        taken.append(planner._next_step_id)
        return go_on(planner, num_steps)

    monkeypatch.setattr(Planner, "_go_on", counted)
    return taken


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("load", LOADS)
def test_the_shortcut_decides_what_the_long_way_decides(
    load: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = count_shortcuts(monkeypatch)
    seeds = range(2 - depth)  # with a plan in flight there is hardly a shortcut
    worlds = [serve(seed, depth, LOADS[load]) for seed in seeds]
    shortened = [told(world) for world in worlds]
    num_taken, num_steps = len(taken), sum(len(world.plans) for world in worlds)
    monkeypatch.setattr(Planner, "_goes_on", lambda planner: False)
    assert shortened == [told(serve(seed, depth, LOADS[load])) for seed in seeds]
    assert len(taken) == num_taken, "the long way was not taken"
    # What each case is there for has happened.
    stats = [world.scheduler.stats for world in worlds]
    if depth == 0:
        assert num_taken > 0.1 * num_steps
    assert sum(s.preemptions for s in stats) > 0 or load != "preempting"
    assert sum(s.drafted_tokens for s in stats) > 0 or "lookahead" not in LOADS[load]
    assert sum(s.prefix_hit_tokens for s in stats) > 0 or load == "no prefix cache"


def test_a_shortcut_that_overlooks_something_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a row near its end, a newcomer."""
    goes_on, go_on = Planner._goes_on, Planner._go_on

    def ignores_the_end(planner: Planner, num_steps: int) -> Any:
        planner._cache.slack_tokens = 10
        return go_on(planner, num_steps)

    def ignores_newcomers(planner: Planner) -> bool:
        waiting, planner.state.waiting = planner.state.waiting, type(planner.state.waiting)()
        try:
            return goes_on(planner)
        finally:
            planner.state.waiting = waiting

    for name, broken in (("_go_on", ignores_the_end), ("_goes_on", ignores_newcomers)):
        with monkeypatch.context() as patch:
            patch.setattr(Planner, name, broken)
            with pytest.raises(AssertionError):
                found = told(serve(0, 0, {}))
                patch.setattr(Planner, "_goes_on", lambda planner: False)
                assert found == told(serve(0, 0, {}))
