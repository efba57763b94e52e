"""What an executor reports of acceptance is what the scheduler learns, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core import committer
from cbatch.core.config import LookaheadConfig
from cbatch.core.events import Committed
from cbatch.core.plan import StepPlan, StepResult
from cbatch.engine.steplog import StepLogWriter, read_step_log, replay
from sim.models import ModelledAcceptance
from tests.helpers import World, make_config, make_request

CHANCES = {f"r{i}": 0.3 + 0.1 * i for i in range(6)}
POLICIES = pytest.mark.parametrize("policy", ["ema", "goodput"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def make_world(policy: str, depth: int = 0, temperature: float = 1.0, log: Any = None) -> World:
    """Requests of known, different acceptance, that draft whatever is believed of them."""
    lookahead = LookaheadConfig(policy=policy, k=4, min_survival=1e-6, drop_evidence=1e9)
    config = make_config(lookahead=lookahead, num_blocks=256, step_budget_tokens=256)
    world = World(config, depth=depth, acceptance=ModelledAcceptance(0.7, CHANCES), log=log)
    for i, name in enumerate(CHANCES):
        world.add(make_request(name, 4 + i, seed=i, max_tokens=90, temperature=temperature))
    return world


def estimates(world: World) -> dict[str, float]:
    state = world.scheduler.state
    if state.controller is not None:
        state.controller._learn_tally()
    found = {}
    for name, sequence in state.sequences.items():
        if sequence.slot is not None:
            accepted, trials = state.table.estimate[:, sequence.slot]
            found[name] = float(accepted / trials)
    return found


def off_by(policy: str, depth: int, temperature: float = 1.0) -> float:
    """How far what is believed is from the truth at most, of the requests that are still there
    after some steps in which others have left."""
    world = make_world(policy, depth, temperature)
    for number in range(24):
        world.step()
        if number in (8, 12):
            world.scheduler.cancel(f"r{number // 6}", world.clock())
    assert world.executor.stats.drafted_tokens > 200
    left = estimates(world)
    assert len(left) == 4
    return max(abs(estimate - CHANCES[name]) for name, estimate in left.items())


@POLICIES
@DEPTHS
def test_beliefs_are_made_of_what_is_reported(
    policy: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator reports chances without noise: only the fading prior is between belief and
    truth. Rows of a plan in flight that have left meanwhile are dropped from the report, too."""
    reported = off_by(policy, depth)
    assert reported < 0.05 < off_by(policy, depth, temperature=0.0)
    if depth == 1:
        monkeypatch.setattr(committer, "_rows", lambda column, live: column)
        with pytest.raises((ValueError, IndexError)):
            off_by(policy, depth)


def test_reports_are_of_rows_that_are_verified_by_rejection() -> None:
    """The simulator's executor; greedy and coupled rows report their counts."""
    world = make_world("ema")
    modes: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "coupled": {"verification": "coupled"},
    }
    for name, params in modes.items():
        world.add(make_request(name, 5, max_tokens=60, **params))
    seen: set[str] = set()
    names: dict[int, str] = {}
    run: Callable[[StepPlan], StepResult] = world.executor.run

    def watch(plan: StepPlan) -> StepResult:
        names.update({a.slot: a.request_id for a in plan.deltas.admitted})
        result = run(plan)
        if result.expected_accepted is None:
            return result
        for i, slot in enumerate(plan.slots.tolist()):
            drafted, accepted = int(result.num_drafted[i]), int(result.num_accepted[i])
            expected: float = accepted
            if names[slot] in CHANCES and drafted:
                expected = CHANCES[names[slot]] * min(accepted + 1, drafted)
            if abs(result.expected_accepted[i] - expected) > 1e-6:
                wrong.append(names[slot])
            seen.update([names[slot]] if drafted else [])
        return result

    wrong: list[str] = []
    world.executor.run = watch  # type: ignore[method-assign]
    for _ in range(20):
        world.step()
    assert seen >= {"greedy", "coupled", "r0", "r5"} and not wrong


@POLICIES
def test_the_log_keeps_reports_and_a_replay_learns_from_them(policy: str, tmp_path: Any) -> None:
    path = tmp_path / "steps.jsonl"
    with StepLogWriter(path) as log:
        world = make_world(policy, log=log)
        for _ in range(20):
            world.step()
    events = read_step_log(path).events
    again = replay(events)
    assert np.array_equal(again.state.table.estimate, world.scheduler.state.table.estimate)
    counts = [
        structs.replace(e, result=structs.replace(e.result, expected_accepted=None))
        if isinstance(e, Committed)
        else e
        for e in events[:30]  # the first steps, in which k is still the same
    ]
    one, other = (replay(part).state.table.estimate for part in (events[:30], counts))
    assert not np.array_equal(one, other)


def test_a_log_from_before_there_were_reports_is_read(tmp_path: Any) -> None:
    path = tmp_path / "steps.jsonl"
    with StepLogWriter(path) as log:
        world = make_world("ema", temperature=0.0, log=log)
        for _ in range(12):
            world.step()
    old = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "result" in record:
            assert record["result"].pop("expected_accepted") is None
        old.append(json.dumps(record))
    path.write_text("\n".join(old) + "\n")
    again = replay(read_step_log(path).events)
    assert np.array_equal(again.state.table.estimate, world.scheduler.state.table.estimate)
