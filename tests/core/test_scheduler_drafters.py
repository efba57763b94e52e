"""Rows with lookup drafters together with rows of the draft model: whose draft KV lags, which rows
pay to catch up, and what the policy learns from the executor's reports."""

from __future__ import annotations

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
from tests.helpers import (
    World,
    make_config,
    make_request,
    rows_of,
)

CHAINS: dict[str, tuple[str, ...] | None] = {
    "default": None,
    "model": ("model",),
    "fallback": ("model", "ngram"),
    "mixed": ("suffix", "model"),
    "lookup": ("suffix",),
}


def serve(world: World, *, twice: bool = True, **params: Any) -> World:
    """Serve one request of each chain; then others continue the prompts and outputs of the
    first."""
    settings = {"max_tokens": 40} | params
    world.add(*(make_request(n, drafter=chain, **settings) for n, chain in CHAINS.items()))
    world.run()
    if twice:
        for name, chain in CHAINS.items():
            prompt = (*world.requests[name].prompt, *world.output(name))
            for other, again in (("model", ("model",)), (name, chain)):
                request = make_request(f"{name} {other} again", prompt, drafter=again, max_tokens=9)
                if request.request_id not in world.requests:
                    world.add(request)
        world.run()
    world.assert_reference()
    return world


def mixed_world(lookahead: str = "fixed:3", **settings: Any) -> World:
    depth = settings.pop("depth", 0)
    drafter = settings.pop("drafter", ("suffix", "model"))
    return World(make_config(lookahead=lookahead, drafter=drafter, **settings), depth=depth)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lookahead", ["fixed:3", "ema:4", "adaptive:4"])
def test_every_chain_at_once_and_prefix_hits_after_them(lookahead, depth):
    """The executor's shadow checks every draft position that the scheduler calls valid."""
    world = serve(mixed_world(lookahead, depth=depth, num_blocks=200))
    drafters = world.executor.stats.rows_by_drafter
    assert drafters["model"] > 10 and drafters["suffix"] > 10
    assert world.scheduler.stats.prefix_hit_tokens > 200
    assert world.executor.stats.num_rejections and world.executor.stats.num_full_acceptances


def test_blocks_that_a_lookup_drafted_are_not_draft_valid():
    lookups = mixed_world(drafter=("suffix",), draft_context_tokens=128)
    lookups.add(make_request("a", max_tokens=60))
    lookups.run()
    assert lookups.executor.stats.rows_by_drafter["suffix"] > 5
    model = mixed_world(drafter=("model",))
    model.add(make_request("a", max_tokens=60))
    model.run()
    for world, valid in ((lookups, 0), (model, 14)):
        prompt = (*world.requests["a"].prompt, *world.output("a"))
        world.add(make_request("b", prompt, max_tokens=4))
        world.step()
        (admission,) = world.plans[-1].deltas.new_sequences
        assert admission.kv_len_tokens > 50
        assert admission.draft_kv_len_tokens >= 4 * valid
        assert bool(admission.draft_kv_len_tokens) == bool(valid)


def test_only_rows_of_the_model_plan_catch_up():
    world = serve(mixed_world("ema:4"))
    planned = {name: 0 for name in world.requests}
    for plan in world.plans:
        for name, row in rows_of(world, plan).items():
            planned[name] += row["catch_up"]
    for name, request in world.requests.items():
        chain = request.params.drafter or world.config.default_chain
        assert bool(planned[name]) == (chain[0] == "model"), name


def test_lookups_alone_have_no_draft_context():
    """Without a draft model no KV lags or catches up, and only the end of the request limits
    drafts."""
    world = mixed_world("fixed:4", drafter=("suffix", "ngram"), draft_context_tokens=None)
    world.add(*(make_request(f"r{i}", max_tokens=40 + i) for i in range(4)))
    world.run()
    world.assert_reference()
    assert world.executor.stats.catch_up_tokens == 0
    assert world.scheduler.stats.accepted_tokens > 30
    assert not any(plan.catch_up.any() for plan in world.plans)


@pytest.mark.parametrize("chain", [("model",), ("model", "ngram"), ("ngram", "model")])
def test_past_the_drafts_context_the_model_alone_stops(chain):
    world = mixed_world("fixed:3", drafter=chain, draft_context_tokens=24)
    world.add(make_request("a", 8, max_tokens=60))
    world.run()
    world.assert_reference()
    beyond = [0]
    known = 8
    for commit, plan in zip(world.commits, world.plans, strict=True):
        if known > 25 and plan.num_rows:
            beyond.append(int(commit.num_drafted.sum()))
            assert not plan.catch_up.any()
        known += int(commit.counts.sum())
    assert bool(sum(beyond)) == (chain != ("model",))


# --- reports of acceptance

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
