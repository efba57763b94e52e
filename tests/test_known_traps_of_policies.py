"""Traps that policies of lookahead fall into: what k follows, and what it must not depend on.

The real scheduler with the simulator's executor; the table of all traps is in test_known_traps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cbatch.core import controller as controller_module
from cbatch.core import estimator, held, lookahead
from cbatch.core.config import LookaheadConfig
from cbatch.core.controller import LookaheadController
from cbatch.core.cost import CostProfile
from cbatch.core.estimator import FleetPrior
from cbatch.core.scheduler import Scheduler
from sim.models import ModelledAcceptance
from tests.helpers import World, make_config, make_request
from tests.test_known_traps import encode

K = 6
GOODPUT = LookaheadConfig(policy="goodput", k=K)
# What the simulator's executor costs (`sim.models.StepCost`).
PROFILE = CostProfile(
    (1, 1024), (2.1e-3, 104.4e-3), row_s=1e-5, draft_pass_s=2e-4, draft_token_s=1e-5
)


def make_world(acceptance: dict[str, float], **settings: Any) -> World:
    """Room for everybody; the acceptance of each request may be changed while it runs. All are
    greedy: what is known of their acceptance is counts alone."""
    roomy = {
        "num_blocks": 2048,
        "block_size_tokens": 16,
        "max_slots": 64,
        "max_model_tokens": 8192,
        "draft_context_tokens": 8192,
        "step_budget_tokens": 1024,
        "lookahead": GOODPUT,
        "cost_profile": PROFILE,
    }
    config = make_config(**(roomy | settings))
    world = World(config, acceptance=ModelledAcceptance(0.7, acceptance))
    for i, name in enumerate(acceptance):
        world.add(make_request(name, 8, seed=i, max_tokens=7000, temperature=0.0))
    return world


def drafts_of(world: World) -> dict[str, int]:
    """One step; k of each row in it that decoded."""
    commit = world.loop.step()
    assert commit is not None
    return {name: drafted for name, _, drafted, _ in commit.updates()}


def slot_of(world: World, name: str) -> int:
    slot = world.scheduler.state.sequences[name].slot
    assert slot is not None
    return slot


# --- 3, 4, 5: what k follows ----------------------------------------------------------------------


def mean_over_k(
    config: LookaheadConfig,
    estimate: np.ndarray,
    drafted: np.ndarray,
    accepted: np.ndarray,
    evidence: None,
) -> np.ndarray:
    """Broken: an EMA of accepted / k."""
    rate = accepted / np.maximum(drafted, 1)
    moved = 0.96 * estimate + 0.04 * np.stack([rate, np.ones_like(rate)])
    return np.where(drafted > 0, moved, estimate)


def estimates_by_cap() -> dict[int, float]:
    """What the scheduler believes of requests of acceptance 0.7 that may draft 1, 2, 4, 8."""
    config = LookaheadConfig(policy="ema", k=8, min_survival=1e-3)
    world = make_world({}, lookahead=config, max_slots=96)
    for i in range(96):
        cap = 2 ** (i % 4)
        own = {"max_tokens": 400, "max_lookahead": cap, "temperature": 0.0}
        world.add(make_request(f"{cap}/{i}", 4, seed=i, **own))
    for _ in range(90):
        world.loop.step()
    assert set(world.executor.stats.rows_by_k) == {1, 2, 4, 8}
    accepted, trials = world.scheduler.state.table.estimate
    found: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    for name in world.requests:
        slot = slot_of(world, name)
        found[int(name.split("/")[0])].append(accepted[slot] / trials[slot])
    return {cap: float(np.mean(each)) for cap, each in found.items()}


def test_trap_3_the_estimate_does_not_depend_on_k(monkeypatch):
    """accepted / k is biased: for acceptance 0.7 it is 0.7 at k = 1 and 0.28 at k = 8."""
    right = estimates_by_cap()
    assert all(abs(estimate - 0.7) < 0.06 for estimate in right.values()), right
    monkeypatch.setattr(lookahead, "observe", mean_over_k)
    broken = estimates_by_cap()
    assert broken[1] - broken[8] > 0.25, broken


def steps_until_all_draft_again(limit: int) -> int | None:
    """A drafter that is hopeless until speculation is off for everybody, and good from then on."""
    acceptance = dict.fromkeys("abcd", 0.03)
    world = make_world(acceptance)
    controller = world.scheduler.state.controller
    assert controller is not None
    while controller.regime.on:
        world.loop.step()
    acceptance.update(dict.fromkeys("abcd", 0.95))
    for step in range(limit):
        if min(drafts_of(world).values()) >= 3:
            assert controller.regime.on
            return step
    return None


def test_trap_4_k_of_zero_does_not_absorb_the_engine(monkeypatch):
    """A canary finds out; without it speculation stays off."""
    back = steps_until_all_draft_again(1000)
    assert back is not None and back > 20
    monkeypatch.setattr(LookaheadController, "_canary", lambda *_: None)
    assert steps_until_all_draft_again(1000) is None


def drafts_of_a_row_given_up(probes: bool, drift: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Its drafts in 400 steps amid rows that draft; it would accept as many as they do."""
    world = make_world(dict.fromkeys(["a", "b", "c", "given up"], 0.9))
    with monkeypatch.context() as patch:
        if not probes:
            patch.setattr(controller_module, "probes", lambda *_: np.zeros(0, dtype=np.intp))
        if not drift:
            patch.setattr(estimator, "drift", lambda config, estimate, *_: estimate)
        for _ in range(30):
            world.loop.step()
        controller = world.scheduler.state.controller
        assert controller is not None
        controller.estimate[:, slot_of(world, "given up")] = 0.3, 15.0  # as after a bad time
        controller._held._left_steps = 0  # an earlier decision stands no more
        controller._tally.take()  # nor do verdicts that nobody was told of
        seen = [drafts_of(world) for _ in range(400)]
    assert seen[5]["given up"] == 0
    assert np.mean([k["a"] > 0 for k in seen]) > 0.95
    return sum(k["given up"] for k in seen)


def test_trap_4_k_of_zero_does_not_absorb_a_row(monkeypatch):
    """Probes bring it back, and so does the drift to the prior; without both nothing does."""
    found = {
        (probes, drift): drafts_of_a_row_given_up(probes, drift, monkeypatch)
        for probes in (True, False)
        for drift in (True, False)
    }
    assert found.pop((False, False)) == 0
    assert min(found.values()) > 100, found


def mean_k(lookahead: LookaheadConfig, batch: int) -> float:
    """Of rows that decode, acceptance 0.7, after 20 steps in which prices and rows settle."""
    world = make_world(dict.fromkeys((f"r{i}" for i in range(batch)), 0.7), lookahead=lookahead)
    for _ in range(20):
        world.loop.step()
    world.executor.stats.rows_by_k.clear()
    for _ in range(40):
        world.loop.step()
    rows = world.executor.stats.rows_by_k
    return sum(k * count for k, count in rows.items()) / rows.total()


def test_trap_5_at_the_same_acceptance_k_falls_as_the_batch_grows():
    """A policy of acceptance alone drafts as much for 64 rows as for 2."""
    priced = [mean_k(GOODPUT, batch) for batch in (2, 12, 64)]
    assert priced[0] > priced[1] + 0.5 > priced[2] + 1, priced
    alone = [mean_k(LookaheadConfig(policy="ema", k=K), batch) for batch in (2, 12, 64)]
    assert max(alone) - min(alone) < 0.8, alone


# --- 6: mixed batches -----------------------------------------------------------------------------


def test_trap_6_easy_and_hard_rows_of_one_step_get_different_k():
    easy, hard = dict.fromkeys("abcdef", 0.95), dict.fromkeys("xy", 0.2)
    world = make_world(easy | hard)
    for _ in range(30):
        world.step()
    seen = [drafts_of(world) for _ in range(60)]
    apart = [min(k[name] for name in easy) - max(k[name] for name in hard) for k in seen]
    assert np.mean(np.array(apart) >= 3) > 0.8, apart


# --- 7, 8: on what k depends ----------------------------------------------------------------------


def own_and_kept_estimate(policy: str, others: float) -> tuple[list[float], list[float]]:
    """N and D of one tenant after 30 steps: of its own drafts alone, and as the scheduler has it
    beside tenants of another acceptance."""
    config = LookaheadConfig(policy=policy, k=K)
    acceptance = {"mine": 0.9} | dict.fromkeys(["x", "y", "z"], others)
    world = make_world(acceptance, lookahead=config)
    own = np.zeros((estimator.NUM_STATISTICS, 1))
    prior = config.prior_acceptance * config.prior_trials, config.prior_trials
    own[:2, 0] = prior
    for _ in range(30):
        commit = world.step()
        assert commit is not None
        rows = {name: (drafted, accepted) for name, _, drafted, accepted in commit.updates()}
        drafted, accepted = (np.array([n], np.int32) for n in rows["mine"])
        if policy == "ema":
            own[:2] = OBSERVE[policy](config, own[:2], drafted, accepted)
        else:
            own = OBSERVE[policy](config, own, drafted, accepted, prior)
    if world.scheduler.state.controller is not None:
        world.scheduler.state.controller._drift()  # else applied when it matters
    kept = world.scheduler.state.table.estimate[:, slot_of(world, "mine")]
    return own[:2, 0].tolist(), kept.tolist()


OBSERVE: dict[str, Callable[..., np.ndarray]] = {
    "ema": lookahead.observe,
    "goodput": estimator.observe,
}
TOLD = {"ema": (lookahead, "observe"), "goodput": (estimator, "update")}


@pytest.mark.parametrize("policy", ["ema", "goodput"])
def test_trap_7_what_is_believed_of_a_request_is_its_own(policy, monkeypatch):
    """No other tenant's acceptance enters; one estimator for the batch is found out. (The prior of
    a newcomer and the price of a token are shared, and meant to be.)"""
    monkeypatch.setattr(held, "LEAST_STEPS", 1)
    monkeypatch.setattr(held, "MOST_STEPS", 1)  # tell of every step at once
    for others in (0.95, 0.4):
        own, kept = own_and_kept_estimate(policy, others)
        assert kept == pytest.approx(own) and own[1] > 10

    told = getattr(*TOLD[policy])

    def pooled(config: Any, known: np.ndarray, *args: Any) -> np.ndarray:
        after = told(config, known, *args)
        after[:2] = after[:2].mean(axis=1, keepdims=True)
        return after

    monkeypatch.setattr(*TOLD[policy], pooled)
    own, kept = own_and_kept_estimate(policy, 0.4)
    assert kept != pytest.approx(own, rel=0.1)


def first_k_after(acceptance: float) -> tuple[float, int]:
    """What a newcomer's acceptance is taken for, and its first k, after 40 short requests."""
    world = make_world({})
    world.executor._acceptance = ModelledAcceptance(acceptance)
    for i in range(0, 40, 4):
        world.add(*(make_request(f"r{j}", 8, seed=j, max_tokens=24) for j in range(i, i + 4)))
        while world.scheduler.has_work:
            world.step()
    world.add(make_request("new", 8, max_tokens=100))
    world.step()
    accepted, trials = world.scheduler.state.table.estimate[:, slot_of(world, "new")]
    return float(accepted / trials), drafts_of(world)["new"]


def test_trap_7_a_short_request_starts_from_the_fleets_prior(monkeypatch):
    """It would end before an estimate of its own tells anything."""
    belief, k = first_k_after(0.95)
    assert belief > 0.85 and k >= 4
    belief, k = first_k_after(0.05)
    assert belief < 0.2 and k <= 1
    monkeypatch.setattr(FleetPrior, "fold", lambda self, *_: self)
    assert [round(first_k_after(a)[0], 6) for a in (0.95, 0.05)] == [0.7, 0.7]


def first_step_apart(*, own_clocks: bool) -> int | None:
    """Two schedulers are fed the same requests and results. With `own_clocks` the second has the
    durations as another machine measured them."""
    rng = np.random.default_rng(2)
    acceptance = {f"r{i}": float(rng.uniform(0.1, 0.95)) for i in range(24)}
    world = make_world({}, max_slots=16, cost_profile=None)
    world.executor._acceptance = ModelledAcceptance(0.7, acceptance)
    first, second = world.scheduler, Scheduler(world.config)
    seen = set()
    for step in range(300):
        if step % 10 == 0 and step < 240:
            name = f"r{step // 10}"
            for scheduler in (first, second):
                scheduler.add(make_request(name, 8, seed=step, max_tokens=150), 0.0)
        plan, replica = first.plan(0.0), second.plan(0.0)
        if encode(plan) != encode(replica):
            return step
        if plan is None:
            continue
        seen.update(plan.num_drafts.tolist())
        result = world.executor.run(plan)
        first.commit(result, 0.0)
        if own_clocks:
            slower = 1 + rng.random()
            result = structs.replace(
                result, draft_s=3 * slower * result.draft_s, target_s=slower * result.target_s
            )
        second.commit(result, 0.0)
    assert len(seen) > 4
    return None


def test_trap_8_replicas_that_are_fed_the_same_choose_the_same_k():
    """Every decision follows from the inputs, durations among them: a replica that measures them
    for itself comes to differ."""
    assert first_step_apart(own_clocks=False) is None
    assert first_step_apart(own_clocks=True) is not None
