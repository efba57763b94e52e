"""Rows with lookup drafters together with rows of the draft model: whose draft KV lags, and which
rows pay to catch up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import ShadowEvidence
from cbatch.core.scheduler.update_from_output import CommittedStep
from cbatch.core.speculation.adaptive_policy import IDLE_STEPS, AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits, Shadow
from tests.checking.kv import ContractBreachError
from tests.checking.models import ModelledAcceptance
from tests.helpers import (
    DraftedRows,
    RowsToPlan,
    World,
    decoding,
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


def test_a_scheduler_that_takes_every_draft_for_the_models_is_caught():
    world = mixed_world(num_blocks=200)
    run = world.executor.run
    world.executor.run = lambda plan: structs.replace(run(plan), draft_kv_lens=None)
    with pytest.raises(ContractBreachError, match="draft"):
        serve(world)


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


def test_names_are_checked():
    for drafter in ((), ("model", "model"), ("eagle",)):
        with pytest.raises(FieldError, match="drafter"):
            SchedulerConfig(num_blocks=4, drafter=drafter)
    with pytest.raises(FieldError, match="'model' needs a draft"):
        SchedulerConfig(num_blocks=4, drafter=("suffix", "model"))


# --- evidence without drafting --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ema", "adaptive"])
def test_shadow_evidence_raises_k_from_0_for_a_request_that_begins_to_copy(policy, monkeypatch):
    """Acceptance is 0 at first, then 1. Given the acceptance that drafts would have had, the policy
    drafts again sooner than by drift to the prior and by probes alone."""

    def steps_until_drafting(begin: int) -> tuple[int, int]:
        acceptance = {"a": 0.0}
        config = make_config(
            drafter=("suffix",), draft_context_tokens=None, max_model_len=1000, num_blocks=250
        )
        lookahead = LookaheadConfig(policy=policy, k=4, idle_drift=0.9999, prior_acceptance=0.5)
        world = World(
            structs.replace(config, lookahead=lookahead),
            acceptance=ModelledAcceptance(0.0, acceptance),
        )
        world.add(make_request("a", max_tokens=900))
        drafted: list[int] = []
        while max(drafted[begin:], default=0) < 2 and len(drafted) < 800:
            acceptance["a"] = float(len(drafted) >= begin)
            commit = world.step()
            assert commit is not None
            drafted.append(int(commit.num_drafted.sum()))
        assert max(drafted[begin - 50 : begin]) <= 1, "it had stopped but for experiments"
        return len(drafted) - begin, world.executor.stats.num_scores

    begins = range(300, 500, 40)  # an experiment may happen to come in any single one of these
    informed, scores = np.mean([steps_until_drafting(begin) for begin in begins], axis=0)
    assert scores > 5
    monkeypatch.setattr(CommittedStep, "live_shadow", lambda *_: None)
    deaf, _ = np.mean([steps_until_drafting(begin) for begin in begins], axis=0)
    assert informed < 60 and deaf > 1.5 * informed


def test_evidence_of_rows_that_left_is_dropped():
    """It must not count for the request that has their slot now."""
    world = mixed_world("ema:4", drafter=("suffix",), draft_context_tokens=None)
    world.add(*(make_request(name, max_tokens=30) for name in "abc"))
    world.step()
    scheduler, policy, slots = world.scheduler, world.scheduler.state.policy, np.arange(3)
    before = policy.estimated_acceptance(slots)
    plan = scheduler.schedule(0.0)
    assert scheduler.cancel("b", 0.0)
    columns = np.arange(3, dtype=np.int32), np.full(3, 40, np.int32), np.full(3, 40, np.int32)
    result = structs.replace(world.executor.run(plan), shadow=ShadowEvidence(*columns))
    scheduler.update_from_output(result, 0.0)
    after = policy.estimated_acceptance(slots)
    assert [b > 0.9 for b in after] == [True, False, True] and max(before) < 0.9


def test_the_controller_hears_of_a_fleet_that_got_better():
    """While drafting is off, good news takes effect at the next decision; old news changes
    nothing."""
    policy = AdaptivePolicy(
        LookaheadConfig(policy="adaptive", k=4, prior_acceptance=0.1), PolicyLimits(8, 64)
    )
    for slot in range(8):
        policy.enter(slot, None)
    slots, trials = np.arange(8, dtype=np.int32), np.full(8, 12, np.int32)
    planned, nothing = RowsToPlan(slice(0, 8), np.full(8, 4, np.int32)), np.zeros(8, np.int32)
    plain = StepSample(decoding(8), 0.0, 5e-3)

    def tell(hits: int) -> np.ndarray | None:
        """Report `accepted` of 12 trials a row; return the next k."""
        shadow = Shadow(slots, trials, np.full(8, hits, np.int32))
        policy.observe(DraftedRows(slice(0, 8), nothing, nothing, plain, shadow=shadow))
        return policy.choose(planned)

    cost_s = {False: 5e-3, True: 8e-3}  # drafts cost more than they are worth
    for _ in range(60):
        k = policy.choose(planned)
        drafted = nothing if k is None else k
        cost = StepSample(decoding(8, drafts=int(drafted.sum())), 0.0, cost_s[k is not None])
        policy.observe(DraftedRows(slice(0, 8), drafted, nothing, cost))
    assert not policy.drafting
    steps = [tell(0) for _ in range(2 * IDLE_STEPS)]
    drafts = [int(k.sum()) for k in steps if k is not None]
    assert len(drafts) < len(steps) / 4 and set(drafts) <= {1}, "experiments alone"
    before = policy.estimate[0] / policy.estimate[1]
    k = next(k for k in (tell(11) for _ in range(IDLE_STEPS + 1)) if k is not None and k.all())
    after = policy.estimate[0] / policy.estimate[1]
    assert (after > before + 0.3).all() and policy.drafting
    assert policy.prior[0] / policy.prior[1] > 0.4, "acted upon after a few steps of it"
