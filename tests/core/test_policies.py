"""Lookahead policies: names, one of the user's own (`module:Class`), and `ema`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.acceptance import survival
from cbatch.core.speculation.build import lookahead_name, parse_lookahead, policy_class
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policies import EmaPolicy
from cbatch.core.speculation.policy import (
    DraftedStep,
    LookaheadPolicy,
    PlannedRows,
    PolicyLimits,
)
from tests.checking.models import ModelledAcceptance
from tests.helpers import DraftedRows, RowsToPlan, World, make_config, make_request

NAME = f"{__name__}:OddSlots"


class OddSlots(LookaheadPolicy):
    """A policy that drafts k in every second slot, and records its calls."""

    def __init__(self, config: LookaheadConfig, limits: PolicyLimits) -> None:
        self.max_depth, self.limits = config.k, limits
        self.calls: list[tuple[str, Any]] = []

    def enter(self, slot: int, policy_state: Any) -> None:
        self.calls.append(("enter", policy_state))

    def leave(self, slot: int) -> Any:
        self.calls.append(("leave", slot))
        return 1.0, 2.0 + slot

    def choose(self, step: PlannedRows) -> np.ndarray | None:
        odd = np.arange(self.limits.max_num_seqs)[step.rows] % 2
        return step.max_drafts * odd.astype(np.int32)

    def observe(self, step: DraftedStep) -> None:
        self.calls.append(("observe", (step.num_drafted, step.num_accepted)))


class Wrong(LookaheadPolicy):
    choice: Any = None

    def choose(self, step: PlannedRows) -> Any:
        return self.choice


def test_the_scheduler_does_what_it_chooses() -> None:
    config = make_config(lookahead=LookaheadConfig(policy=NAME, k=3), num_blocks=24)
    world = World(config, acceptance=ModelledAcceptance(0.6))
    world.add(*(make_request(name, max_tokens=60) for name in "abcd"))
    ks: dict[int, set[int]] = {0: set(), 1: set()}
    while world.scheduler.has_work:
        commit = world.step()
        assert commit is not None
        slots = world.plans[-1].slots
        for slot, k in zip(slots.tolist(), commit.num_drafted.tolist(), strict=True):
            ks[slot % 2].add(k)
    assert ks[0] == {0} and {0, 3} <= ks[1]
    world.assert_reference()
    policy: Any = world.scheduler.state.policy
    observed = [what for call, what in policy.calls if call == "observe"]
    assert len(observed) == len(world.commits) and any(k.any() and a.any() for k, a in observed)
    assert world.scheduler.stats.preemptions > 0
    states = [what for call, what in policy.calls if call == "enter"]
    assert states.count(None) == 4 and any(each is not None and each[1] >= 2 for each in states)


@pytest.mark.parametrize(
    "choice",
    [np.ones(2), np.ones(3, np.int32), np.array([1, 9], np.int32), np.array([-1, 0], np.int32)],
)
def test_a_choice_that_cannot_be_is_named(choice: np.ndarray) -> None:
    class_ = policy_class(f"{__name__}:Wrong")
    policy: Any = class_(LookaheadConfig(policy="own", k=4), PolicyLimits(2, 64))
    rows = RowsToPlan(slice(0, 2), np.full(2, 4, np.int32))
    policy.choice = np.array([0, 4], np.int32)
    assert policy.choose(rows) is policy.choice
    policy.choice = choice
    with pytest.raises(ValueError, match="Wrong.choose returned"):
        policy.choose(rows)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("greedy", "is not known"),
        ("goodput:", "is not known"),
        ("goodput:many", "cannot be imported"),
        ("no_such_module:Policy", "cannot be imported"),
        (f"{__name__}:NoSuch", "cannot be imported"),
        (f"{__name__}:NAME", "is not a policy"),
        ("off:3", "is not known"),
    ],
)
def test_names_that_are_none(name: str, problem: str) -> None:
    with pytest.raises(FieldError, match=f"lookahead: {name!r} {problem}"):
        parse_lookahead(name)


@pytest.mark.parametrize(
    ("name", "policy", "k"),
    [("fixed", "fixed", 4), ("ema:6", "ema", 6), (NAME, NAME, 8), (f"{NAME}:2", NAME, 2)],
)
def test_names_with_k(name: str, policy: str, k: int) -> None:
    config = parse_lookahead(name)
    assert (config.policy, config.k, lookahead_name(config)) == (policy, k, f"{policy}:{k}")


# --- ema ----------------------------------------------------------------------------------------

EMA = LookaheadConfig(policy="ema", k=8)
CAPS = np.full(3, 8, dtype=np.int32)


def policy_of(*carried: tuple[float, float] | None) -> EmaPolicy:
    policy = EmaPolicy(EMA, PolicyLimits(len(carried), 64))
    for slot, sums in enumerate(carried):
        policy.enter(slot, sums)
    return policy


def test_positions_after_the_first_rejection_are_no_trials() -> None:
    policy = policy_of((4.0, 6.0))
    policy.observe(DraftedRows(slice(0, 1), np.array([8], np.int32), np.array([2], np.int32)))
    assert policy.leave(0) == pytest.approx((4 * EMA.decay**3 + 2, 6 * EMA.decay**3 + 3))


def test_survival_is_the_beta_moment_and_never_rises_along_a_row() -> None:
    estimate = np.array([[7.0, 1.0], [10.0, 10.0]])
    s = survival(estimate[0], estimate[1], 6)
    assert s[0, 0] == pytest.approx(0.7)
    assert s[0, 1] == pytest.approx(0.7 * 8 / 11)
    assert (np.diff(s, axis=1) <= 0).all()
    assert (s[0] >= 0.7 ** np.arange(1, 7)).all()  # Jensen's inequality: mildly optimistic


def test_k_follows_acceptance_and_zero_is_not_absorbing() -> None:
    """Trap 4 (k = 0 absorbs)."""
    policy, zero = policy_of((30.0, 31.0), (20.0, 31.0), (2.0, 31.0)), np.zeros(3, np.int32)
    k = policy.choose(RowsToPlan(slice(0, 3), CAPS))
    assert k is not None and k[0] == 8 and 2 <= k[1] <= 4 and k[2] == 0
    for _ in range(500):
        policy.observe(DraftedRows(slice(0, 3), zero, zero))
    k = policy.choose(RowsToPlan(slice(0, 3), CAPS))
    assert k is not None and (k >= 2).all()


@pytest.mark.parametrize("field", ["k", "decay", "prior_acceptance", "min_survival"])
def test_bad_configuration_names_its_field(field: str) -> None:
    with pytest.raises(FieldError, match=f"lookahead.{field}"):
        LookaheadConfig(**{field: 0})
