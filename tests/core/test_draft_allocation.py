"""Compare the allocation with a brute force over every vector k, and check invariants of any
decision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cbatch.core.prices.step_costs import StepPrices
from cbatch.core.speculation.draft_allocation import LookaheadDecision, decide, weights

CASES = 200


def random_case(
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, StepPrices, LookaheadDecision | None]:
    """Return few rows with ties (rounded chances), caps, and costs that are flat, stairs or
    steep."""
    rows, depth = int(rng.integers(1, 5)), int(rng.integers(1, 5 if rng.random() < 0.3 else 4))
    chances = rng.random((rows, depth)).round(int(rng.integers(1, 4)))
    caps = rng.integers(0, depth + 1, rows).astype(np.int32)
    budget = int(rng.integers(0, rows * depth + 1))
    stairs = rng.random(budget + 1) * (rng.random(budget + 1) < 0.4) * rng.choice([0.1, 0.3, 1.0])
    prices = StepPrices(1 + np.cumsum(stairs), float(rng.choice([0.0, 0.05, 0.2])))
    before = None
    if rng.random() < 0.5:
        before = LookaheadDecision(rng.integers(0, depth + 1, rows).astype(np.int32), 0.1)
    return np.multiply.accumulate(chances, axis=1), caps, prices, before


def speed_of(
    k: tuple[int, ...],
    survival: np.ndarray,
    caps: np.ndarray,
    prices: StepPrices,
    before: LookaheadDecision | None,
) -> float:
    """Return the speed G(k) by its definition."""
    masked = np.where(np.arange(survival.shape[1]) < caps[:, None], survival, 0.0)
    weight = np.ones(len(k)) if before is None else weights(masked.T, prices, before)
    tokens = [1 + masked[i, :drafts].sum() for i, drafts in enumerate(k)]
    return float(weight @ tokens / (prices.step_s[sum(k)] + prices.pass_s * max(k)))


def test_no_vector_k_is_better_by_more_than_the_resolution_of_worths() -> None:
    """The budget does not bind here; where it does, the plan cuts the drafts."""
    rng = np.random.default_rng(0)
    ratios, drafts = [], []
    while len(ratios) < CASES:
        survival, caps, prices, before = case = random_case(rng)
        if caps.sum() >= len(prices.step_s):
            continue
        decision = decide(survival.T, caps, prices, before)
        assert (decision.num_drafts <= caps).all()
        every = itertools.product(*(range(cap + 1) for cap in caps.tolist()))
        best = max(speed_of(k, *case) for k in every)
        ratios.append(best / speed_of(tuple(decision.num_drafts.tolist()), *case))
        drafts.append(int(decision.num_drafts.sum()))
    # The worst cases are ties of coarse chances on steep stairs, where either all of them draft or
    # none.
    assert np.mean(ratios) < 1.003 and np.quantile(ratios, 0.99) < 1.06, sorted(ratios)[-9:]
    assert 0.2 < np.mean(np.array(drafts) == 0) < 0.8, "both outcomes occur"


def test_large_steps_agree_with_the_search_of_every_depth() -> None:
    """The case has 256 sorted rows."""
    rng = np.random.default_rng(1)
    drafted, ratios = 0, []
    for case in range(40):
        likely = (6, 3) if case % 2 else (1, 15)
        values = np.multiply.accumulate(rng.beta(*likely, (8, 256)), axis=0)
        stair = int(rng.choice([1, 16, 64]))
        count = -(-np.arange(2049) // stair) * stair
        step_s = 5e-3 + np.maximum(count - rng.integers(0, 600), 0) * rng.choice([1e-5, 6e-5])
        prices = StepPrices(step_s, float(rng.choice([0.0, 2e-4, 1e-3])))
        best = 256 / step_s[0]
        for depth in range(1, 9):
            ranked = np.sort(values[:depth], axis=None)[::-1]
            cost_s = step_s[1 : len(ranked) + 1] + prices.pass_s * depth
            best = max(best, float(((256 + np.cumsum(ranked)) / cost_s).max()))
        decision = decide(values, np.full(256, 8, np.int32), prices)
        drafted += decision.tokens_per_s is not None
        k = decision.num_drafts
        tokens = 256 + np.where(np.arange(8)[:, None] < k, values, 0.0).sum()
        ratios.append(tokens / (step_s[k.sum()] + prices.pass_s * k.max()) / best)
    assert 5 < drafted < 40
    # A stair of 64 tokens ends within one grade of worth.
    assert np.mean(ratios) > 0.995 and min(ratios) > 0.96, sorted(ratios)[:9]


def test_caps_hold_and_beyond_a_budget_nothing_is_counted_on() -> None:
    survival = np.full((4, 5), 0.9)
    caps = np.array([4, 0, 1, 4, 2], np.int32)
    for budget in range(12):
        decision = decide(survival, caps, StepPrices(np.ones(budget + 1), 0.0))
        assert (decision.num_drafts <= caps).all()
        assert decision.num_drafts.sum() >= min(budget, caps.sum())
        assert decision.gain == pytest.approx(0.9 * min(budget, caps.sum()) / 5)


def test_weights_favour_rows_that_cost_most_per_token() -> None:
    survival = np.multiply.accumulate(np.array([[0.9, 0.3]] * 4), axis=0)  # an easy, a hard row
    prices = StepPrices(2.0 + 0.2 * np.arange(9), 0.0)  # a slot takes 1, a draft 0.2
    weight = weights(survival, prices, LookaheadDecision(np.array([4, 0], np.int32), 0.1))
    assert weight.mean() == pytest.approx(1) and weight[1] > weight[0]
    easy = min((1 + 0.2 * k) / (1 + survival[:k, 0].sum()) for k in range(5))
    hard = min((1 + 0.2 * k) / (1 + survival[:k, 1].sum()) for k in range(5))
    assert weight[0] / weight[1] == pytest.approx(easy / hard)


def test_shared_passes_are_not_charged_to_each_row() -> None:
    """No single row could pay for a pass, but 32 rows together can. A price per row would make k
    collapse."""
    one, many = np.full((1, 1), 0.6), np.full((32, 1), 0.6)
    for survival, drafts in ((one, 0), (many, 32)):
        rows = len(survival)
        prices = StepPrices(1 + 0.001 * np.arange(rows + 1), 0.4 if rows > 1 else 0.7)
        k = decide(survival.T, np.ones(rows, np.int32), prices).num_drafts
        assert k.sum() == drafts


def test_waiting_prompts_lessen_the_gain_and_are_no_tokens() -> None:
    survival, prices = np.full((1, 2), 0.9), StepPrices(np.array([1.0, 1.1, 1.2]), 0.0)
    alone = decide(survival, np.ones(2, np.int32), prices)
    waited = decide(survival, np.ones(2, np.int32), prices, num_waiting=2)
    assert alone.tokens_per_s == pytest.approx(3.8 / 1.2)
    assert alone.gain == pytest.approx(1.9 / 1.2 - 1)
    assert waited.tokens_per_s == pytest.approx(3.8 / 1.2)
    assert waited.gain == pytest.approx(2.9 / 2 / 1.2 - 1)
