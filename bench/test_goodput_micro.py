"""`pytest bench --benchmark-enable`: the `goodput` decision at 256 rows and 8 depths.

`flat` is memory-bound at this load, `steep` compute-bound, `stairs` rises in steps of 64 tokens.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cbatch.core.config import LookaheadConfig
from cbatch.core.controller import LookaheadController, Room, StepCost
from cbatch.core.cost import CostModel, CostProfile, StepLoad
from cbatch.core.goodput import decide
from cbatch.core.lookahead import survival
from cbatch.core.regime import Due

ROWS, DEPTH = 256, 8
TOKENS = ROWS * (1 + DEPTH)
STAIRS = tuple(n for first in range(0, TOKENS, 64) for n in (first + 1, first + 64))
PROFILES = {
    "flat": CostProfile(
        (1, 64, TOKENS), (10e-3, 10.5e-3, 20e-3), draft_pass_s=3e-4, draft_token_s=2e-6
    ),
    "steep": CostProfile(
        (1, 2, TOKENS), (10e-3, 10.1e-3, 200e-3), draft_pass_s=1e-3, draft_token_s=1e-5
    ),
    "stairs": CostProfile(
        STAIRS,
        tuple(0.01 + 2e-5 * max(0, (n - 1) // 64 - 4) * 64 for n in STAIRS),
        draft_pass_s=3e-4,
    ),
}


def inputs(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N and D of rows whose acceptance is spread about 2/3, and caps."""
    rng = np.random.default_rng(0)
    trials = rng.uniform(8, 25, rows)
    return rng.beta(6, 3, rows) * trials, trials, np.full(rows, DEPTH, np.int32)


def controller_of(kind: str, rows: int) -> LookaheadController:
    """A controller that knows these rows."""
    controller = LookaheadController(
        LookaheadConfig(policy="goodput", k=DEPTH),
        max_slots=rows,
        max_tokens=TOKENS,
        profile=PROFILES[kind],
    )
    controller.statistics[:2] = inputs(rows)[:2]
    return controller


@pytest.mark.parametrize("kind", PROFILES)
def test_decide(benchmark, kind):
    accepted, trials, caps = inputs(ROWS)
    chances = survival(accepted, trials, DEPTH)
    prices = CostModel(PROFILES[kind], max_tokens=TOKENS).prices(ROWS, ROWS, 0, ROWS * DEPTH)
    market = None
    for _ in range(5):
        market = decide(chances, caps, prices, market).market
    decision = benchmark(decide, chances, caps, prices, market)
    assert (decision.num_drafts.sum() > 0) == (kind != "steep")


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_whole_choice(benchmark, rows):
    """Survival, prices, decision and probes, as a plan calls it; few rows decide seldom."""
    controller, caps = controller_of("flat", rows), inputs(rows)[2]
    lag, room = np.zeros(rows, np.int32), partial(Room, rows, 0)
    k = benchmark(controller.choose, Due.DECISION, slice(0, rows), caps, lag, TOKENS, room)
    assert k is not None and k.any()


def test_survival(benchmark):
    accepted, trials, _ = inputs(ROWS)
    chances = benchmark(survival, accepted, trials, DEPTH)
    assert chances.shape == (ROWS, DEPTH) and (np.diff(chances, axis=1) <= 0).all()


def test_a_step_while_off(benchmark):
    """What k = 0 for everyone costs, drafts that are no good: all calls, decisions and canaries
    included."""
    controller, caps = controller_of("steep", ROWS), inputs(ROWS)[2]
    controller.statistics[0] *= 0.1
    rows, zero, lag = slice(0, ROWS), np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    room = partial(Room, ROWS, 0)

    def step() -> None:
        due, k = controller.due(ROWS), None
        if due is not Due.NOTHING:
            k = controller.choose(due, rows, caps, lag, TOKENS, room)
        if controller.rests(num_rows=ROWS, drafted=k is not None):
            return
        cost = _cost(0, 0) if k is None else _cost(int(k.max()), int(k.sum()))
        controller.learn(rows, zero if k is None else k, zero, cost)

    for _ in range(2000):
        step()
    assert not controller.regime.on
    benchmark.pedantic(step, rounds=20, iterations=640)
    assert not controller.regime.on


def _cost(depth: int, drafts: int) -> StepCost:
    load = StepLoad(
        rows=ROWS,
        target_tokens=ROWS + drafts,
        logit_tokens=ROWS + drafts,
        context_tokens=0,
        depth=depth,
        draft_tokens=drafts,
    )
    return StepCost(load, 1e-3 * depth, 0.03 + 9e-5 * drafts)
