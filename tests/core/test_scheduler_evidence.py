"""The scheduler learns acceptance from the executor's reports, row by row."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core.scheduler.events import Committed
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.steplog.recorder import StepRecorder
from cbatch.steplog.step_log import read_step_log, replay
from tests.checking.models import ModelledAcceptance
from tests.helpers import World, make_config, make_request

CHANCES = {f"r{i}": 0.3 + 0.1 * i for i in range(6)}
POLICIES = pytest.mark.parametrize("policy", ["ema", "adaptive"])


def make_world(policy: str, depth: int = 0, temperature: float = 1.0, log: Any = None) -> World:
    """Make requests of known, different acceptance, which draft whatever the estimate is."""
    lookahead = LookaheadConfig(policy=policy, k=4, min_survival=1e-6)
    config = make_config(
        lookahead=lookahead,
        num_blocks=1024,
        max_num_batched_tokens=256,
        max_model_len=512,
        draft_context_tokens=512,
    )
    world = World(config, depth=depth, acceptance=ModelledAcceptance(0.7, CHANCES), log=log)
    for i, name in enumerate(CHANCES):
        world.add(make_request(name, 4 + i, seed=i, max_tokens=400, temperature=temperature))
    return world


def beliefs(scheduler: Scheduler) -> dict[str, float]:
    sequences = scheduler.state.sequences
    slots = np.array([sequence.slot for sequence in sequences.values()])
    estimates = scheduler.state.policy.estimated_acceptance(slots)
    assert estimates is not None
    return dict(zip(sequences, estimates, strict=True))


def off_by(policy: str, depth: int, temperature: float = 1.0) -> float:
    """Return the largest error of the estimates. It covers the requests that remain after some
    steps, in which others left."""
    world = make_world(policy, depth, temperature)
    for number in range(50):
        world.step()
        if number in (8, 12):
            world.scheduler.cancel(f"r{number // 6}", world.clock())
    assert world.executor.stats.drafted_tokens > 200
    left = beliefs(world.scheduler)
    assert len(left) == 4
    return max(abs(belief - CHANCES[name]) for name, belief in left.items())


@POLICIES
@pytest.mark.parametrize("depth", [0, 1])
def test_beliefs_are_made_of_what_is_reported(policy: str, depth: int) -> None:
    """The simulator reports chances without noise: only the fading prior separates estimate and
    truth. Reports of rows of a plan in flight that have left meanwhile are dropped."""
    assert off_by(policy, depth) < 0.05 < off_by(policy, depth, temperature=0.0)


@POLICIES
def test_the_log_keeps_reports_and_a_replay_learns_from_them(policy: str, tmp_path: Any) -> None:
    path = tmp_path / "steps.jsonl"
    with StepRecorder(path) as log:
        world = make_world(policy, log=log)
        for _ in range(40):
            world.step()
    events = read_step_log(path).events
    # `adaptive` learns when it decides; until then k is the same.
    begin = events[: {"ema": 30, "adaptive": 66}[policy]]
    assert beliefs(replay(events)) == beliefs(world.scheduler)
    counts = [
        structs.replace(e, result=structs.replace(e.result, expected_accepted=None))
        if isinstance(e, Committed)
        else e
        for e in begin
    ]
    assert beliefs(replay(counts)) != beliefs(replay(begin))


def test_a_log_from_before_there_were_reports_is_read(tmp_path: Any) -> None:
    path = tmp_path / "steps.jsonl"
    with StepRecorder(path) as log:
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
    assert beliefs(replay(read_step_log(path).events)) == beliefs(world.scheduler)
