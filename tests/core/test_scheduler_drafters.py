"""Rows drafted by lookups beside the draft model's: whose KV is behind, and who pays for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core.committer import Committer
from cbatch.core.config import LookaheadConfig, SchedulerConfig
from cbatch.core.controller import LookaheadController
from cbatch.core.errors import FieldError
from cbatch.core.plan import RowStatus, ShadowEvidence
from cbatch.core.regime import Due
from sim.executor import Faults
from sim.models import ModelledAcceptance
from sim.shadow import ContractBreachError
from tests.helpers import World, make_config, make_request, rows_of

CHAINS: dict[str, tuple[str, ...] | None] = {
    "default": None,
    "model": ("model",),
    "fallback": ("model", "ngram"),
    "mixed": ("suffix", "model"),
    "lookup": ("suffix",),
}


def serve(world: World, *, twice: bool = True, **params: Any) -> World:
    """One request of each chain; then others go on from the prompts and outputs of the first."""
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
@pytest.mark.parametrize("lookahead", ["fixed:3", "ema:4", "goodput:4"])
def test_every_chain_at_once_and_prefix_hits_after_them(lookahead, depth):
    """The executor's shadow checks every draft position that the scheduler calls valid."""
    world = serve(mixed_world(lookahead, depth=depth, num_blocks=200))
    drafters = world.executor.stats.rows_by_drafter
    assert drafters["model"] > 10 and drafters["suffix"] > 10
    assert world.scheduler.stats.prefix_hit_tokens > 200
    assert world.executor.stats.num_rejections and world.executor.stats.num_full_acceptances


def test_preemption():
    world = serve(mixed_world(num_blocks=30), twice=False)
    assert world.scheduler.stats.preemptions > 0
    assert world.executor.stats.rows_by_drafter["suffix"] > 10


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
        (admission,) = world.plans[-1].deltas.admitted
        assert admission.kv_len_tokens > 50
        assert admission.draft_kv_len_tokens >= 4 * valid
        assert bool(admission.draft_kv_len_tokens) == bool(valid)


def test_a_scheduler_that_takes_every_draft_for_the_models_is_caught(monkeypatch):
    advance = Committer._advance_draft

    def credulous(self: Committer, step: Any) -> None:
        step.result = structs.replace(step.result, draft_kv_lens=None)
        advance(self, step)

    monkeypatch.setattr(Committer, "_advance_draft", credulous)
    with pytest.raises(ContractBreachError, match="draft"):
        serve(mixed_world(num_blocks=200))


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
    """No draft model: nothing lags, nothing is caught up, and drafts end with the request alone."""
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


def test_a_broken_draft_beside_lookups():
    faults = Faults(draft_non_finite_at={n: frozenset({9, 20}) for n in CHAINS})
    config = make_config(lookahead="fixed:3", drafter=("suffix", "model"))
    world = World(config, faults=faults)
    seen = []
    world.executor.run = _watch(world.executor.run, seen)
    serve(world, twice=False)
    assert sum(seen) >= 2


def _watch(run: Any, seen: list[int]) -> Any:
    def watched(plan: Any) -> Any:
        result = run(plan)
        seen.append(int((result.status == RowStatus.DRAFT_NON_FINITE).sum()))
        return result

    return watched


def test_names_are_checked():
    for drafter in ((), ("model", "model"), ("eagle",)):
        with pytest.raises(FieldError, match="drafter"):
            SchedulerConfig(num_blocks=4, drafter=drafter)
    with pytest.raises(FieldError, match="'model' needs a draft"):
        SchedulerConfig(num_blocks=4, drafter=("suffix", "model"))


# --- evidence that nobody paid for ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ema", "goodput"])
def test_shadow_evidence_raises_k_from_0_for_a_request_that_begins_to_copy(policy, monkeypatch):
    """Acceptance is 0 at first, then 1. Told of what it would have scored, the policy drafts again
    sooner than by drift to the prior, probes and canaries alone."""

    def steps_until_drafting() -> tuple[int, int]:
        acceptance = {"a": 0.0}
        config = make_config(
            drafter=("suffix",), draft_context_tokens=None, max_model_tokens=1000, num_blocks=250
        )
        lookahead = LookaheadConfig(policy=policy, k=4, idle_drift=0.9999, prior_acceptance=0.5)
        world = World(
            structs.replace(config, lookahead=lookahead),
            acceptance=ModelledAcceptance(0.0, acceptance),
        )
        world.add(make_request("a", max_tokens=900))
        drafted: list[int] = []
        while sum(drafted[200:]) < 12 and len(drafted) < 700:
            acceptance["a"] = float(len(drafted) >= 200)
            commit = world.step()
            assert commit is not None
            drafted.append(int(commit.num_drafted.sum()))
        assert sum(drafted[150:200]) <= 4, "it had all but stopped"
        return len(drafted) - 200, world.executor.stats.num_scores

    informed, scores = steps_until_drafting()
    assert scores > 5
    monkeypatch.setattr(Committer, "_overhear", lambda *_: None)
    deaf, _ = steps_until_drafting()
    print(policy, informed, deaf)
    assert informed < 60 and deaf > 1.5 * informed


def test_evidence_of_rows_that_left_is_dropped():
    """Whoever has their slot by now has not earned it."""
    world = mixed_world("ema:4", drafter=("suffix",), draft_context_tokens=None)
    estimate = world.scheduler.state.table.estimate
    estimate[:] = [[3.0], [6.0]]
    flight = SimpleNamespace(plan=SimpleNamespace(slots=np.arange(2, 5)), void_slots=[3])
    columns = np.arange(3, dtype=np.int32), np.full(3, 4, np.int32), np.full(3, 4, np.int32)
    Committer(world.scheduler.state)._overhear(ShadowEvidence(*columns), flight)
    rose = estimate[0] / estimate[1] > 0.5
    assert np.flatnonzero(rose).tolist() == [2, 4]


def test_the_controller_hears_of_a_fleet_that_got_better():
    """While off, good news of enough rows calls for a decision; old news does not."""
    controller = LookaheadController(
        LookaheadConfig(policy="goodput", k=4, prior_acceptance=0.1), max_slots=8, max_tokens=64
    )
    for slot in range(8):
        controller.enter(slot)
    controller.regime.on, controller.regime.newcomers = False, 0
    controller.regime.canary_in, controller.regime.rows_judged = 500, 8
    slots, trials = np.arange(8, dtype=np.int32), np.full(8, 12, np.int32)
    controller.overhear(slots, trials, np.zeros(8, np.int32))
    assert controller.due(8) is Due.NOTHING
    before = controller.estimate[0] / controller.estimate[1]
    controller.overhear(slots, trials, np.full(8, 11, np.int32))
    after = controller.estimate[0] / controller.estimate[1]
    assert (after > before + 0.3).all()
    assert controller.due(8) is Due.DECISION
    prior = controller.prior
    controller.leave(0)
    assert controller.prior[0] / controller.prior[1] > prior[0] / prior[1]
