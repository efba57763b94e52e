"""Which rows draft how many tokens, so that a step commits the most tokens a second.

This is what the `goodput` policy (goodput_policy.py) maximises when it decides.

With S_ij the chance that row i's first j drafts survive, C(n) the seconds of a step with n drafts
in all, and c0 those of a sequential pass of the drafter, the best k maximises

    G(k) = sum_i w_i (1 + sum_{j <= k_i} S_ij) / (C(sum_i k_i) + c0 max_i k_i).

For a given depth the n best pairs (i, j) are the n largest w_i S_ij, and since S falls along a row
they are a prefix of each: sort, sum up, divide by the cost of every n, take the global maximum (C
is a staircase, so the first local one would be a trap). An outer loop over depth prices the passes,
which all rows share. (Fractional program: Dinkelbach 1967; global top-n: TETRIS, arXiv 2502.15197.)

The weights w_i mend the closed loop. With slots kept full, throughput is slots * H / T with H the
harmonic mean of the tokens per step, and its optimum is that every row minimises its own cost per
token at shared prices: (slot + token k) / m_i(k), m_i(k) = 1 + sum_{j <= k} S_ij. That minimum is
w_i; without it easy rows leave early and hard ones fill the batch.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import structs

from cbatch.core.speculation.cost_model import StepPrices

_ROUNDING = 1e-12
_UNEVEN = 0.02  # what unequal depths must promise: a pass, and a product, serves equal rows best
_LEAST_S = 1e-12
_DEPTHS = np.arange(64, dtype=np.float64)[:, None]
_UP_TO = np.tril(np.ones((64, 64)))  # as a product: sums along the depths
_COUNTS = np.arange(65_536, dtype=np.float64)
_FEW = 64  # values


class ShadowPrices(msgspec.Struct, frozen=True):
    """What a decision leaves for the next: seconds that a row's slot and a drafted token cost (its
    shadow prices, as in linear programming: what one more of a shared resource would be worth), and
    the depth to try first."""

    slot_s: float
    token_s: float
    depth: int


class LookaheadDecision(msgspec.Struct, frozen=True):
    """`num_drafts` is k of each row, int32 [rows]; `gain` the expected speed over drafting nothing,
    less 1, and 0 if that is what was decided."""

    num_drafts: np.ndarray
    gain: float
    shadow_prices: ShadowPrices
    threshold: float = np.inf  # lambda: a survival of about so much was worth a draft
    tokens_per_s: float | None = None  # expected, weighted; None: nobody drafts


class DepthChoice(msgspec.Struct, frozen=True):
    """The best `count` pairs of at most `depth`; G(k) is `goodput`, weighted tokens a second."""

    depth: int
    count: int
    goodput: float
    threshold: float  # the smallest value taken


def decide(
    survival: np.ndarray,
    caps: np.ndarray,
    prices: StepPrices,
    shadow_prices: ShadowPrices | None = None,
    blocks: tuple[np.ndarray, int] | None = None,
    catch_up_cost_s: np.ndarray | None = None,
) -> LookaheadDecision:
    """k of each row for the best expected goodput of the step.

    `survival` is float64 [rows, depth], non-increasing along a row; `caps` int32 [rows]; no more
    drafts are made than `prices` is long. `shadow_prices` are the previous decision's, None at
    first. `blocks`, where the pool is short, is (int32 [rows] positions that each row can draft
    within its own blocks, free positions): the drafts beyond, in order of worth, end where those
    do. `catch_up_cost_s` float64 [rows]: what it costs, as a share of this step, that the drafter
    catches up with a row; a row drafts only if its drafts are worth that, too.
    """
    values = np.ascontiguousarray(survival.T)  # [depth, rows]: sums along rows are then contiguous
    depth, rows = values.shape
    lowest = int(np.minimum.reduce(caps))
    if lowest < depth:
        values = values[: int(np.maximum.reduce(caps))]
        values = np.where(_DEPTHS[: len(values)] < caps, values, 0.0)
    if shadow_prices is not None and rows > 1:
        values = values * weigh(values, shadow_prices)
    choice = best_choice(values, prices, 1 if shadow_prices is None else shadow_prices.depth)
    if catch_up_cost_s is not None and choice is not None:
        values, prices = _without_late_rows(values, prices, choice, catch_up_cost_s)
        choice = best_choice(values, prices, choice.depth)
    if blocks is not None and choice is not None:
        choice = _within_blocks(values, prices, choice, *blocks)
    if choice is None:
        return LookaheadDecision(
            np.zeros(rows, dtype=np.int32), 0.0, _shadow_prices_at(prices, rows, 0, 0, 1)
        )
    num_drafts = _take(values[: choice.depth], choice)
    first_depth = choice.depth
    even = None if blocks is not None or rows == 1 else _even(values, prices, num_drafts, caps)
    if even is not None and even[1] * (1 + _UNEVEN) >= choice.goodput:
        num_drafts, worth = even
        count, depth = int(np.add.reduce(num_drafts)), int(np.maximum.reduce(num_drafts))
        choice = DepthChoice(depth, count, worth, choice.threshold)
    gain = choice.goodput * prices.step_s[0] / rows - 1
    shadow_prices = _shadow_prices_at(prices, rows, choice.count, choice.depth, first_depth)
    return LookaheadDecision(
        num_drafts, float(gain), shadow_prices, choice.threshold, choice.goodput
    )


def weigh(values: np.ndarray, shadow_prices: ShadowPrices) -> np.ndarray:
    """w_i, float64 [rows] of mean 1, for survival [depth, rows] masked by the caps.

    The minimum is sought up to a little beyond the depth of the last decision, whose prices these
    are."""
    depth = min(shadow_prices.depth + 2, len(values))
    tokens = _UP_TO[:depth, :depth] @ values[:depth]
    tokens += 1
    cost_s = shadow_prices.slot_s + shadow_prices.token_s * _DEPTHS[1 : depth + 1]
    weights: np.ndarray = np.minimum.reduce(cost_s / tokens, axis=0, initial=shadow_prices.slot_s)
    weights *= len(weights) / float(np.add.reduce(weights))
    return weights


def best_choice(values: np.ndarray, prices: StepPrices, first_depth: int) -> DepthChoice | None:
    """The global optimum over depth and count; None if drafting nothing is best.

    `values` are w_i S_ij, float64 [depth, rows], of mean weight 1. `first_depth` is evaluated
    first: the others are only looked at where an upper bound exceeds the best so far.
    """
    depth, rows = values.shape
    if not depth or len(prices.step_s) < 2:
        return None
    alone_s = float(prices.step_s[0])
    if values.size <= _FEW:
        best = _best_of_few(values, prices)
        return best if best.goodput * alone_s > rows else None
    first = min(max(first_depth, 1), depth)
    best = _evaluate(values[:first], prices)
    price = best.goodput
    bounds = enumerate(_excess_bounds(values, prices, best), start=1)
    open_depths = [(d, excess) for d, excess in bounds if excess > _ROUNDING * rows and d != first]
    for d, excess in sorted(open_depths, key=_by_excess):
        # A better choice since then took its rise in price off every bound.
        if excess > (best.goodput - price) * (alone_s + prices.pass_s * d):
            best = max(best, _evaluate(values[:d], prices), key=_goodput)
    return best if best.goodput * alone_s > rows else None


def _best_of_few(values: np.ndarray, prices: StepPrices) -> DepthChoice:
    """The best choice of every depth in plain loops: of few values they beat array operations."""
    step_s = prices.step_s[: values.size + 1].tolist()
    rows, best, best_depth, best_count, threshold = values.shape[1], 0.0, 1, 1, 0.0
    ranked: list[float] = []
    for depth, survival in enumerate(values.tolist(), start=1):
        ranked = sorted(ranked + survival, reverse=True)
        passes_s, tokens = prices.pass_s * depth, 0.0
        for count, (value, whole_s) in enumerate(zip(ranked, step_s[1:], strict=False), start=1):
            tokens += value
            goodput = (tokens + rows) / (whole_s + passes_s)
            if goodput > best:
                best, best_depth, best_count, threshold = goodput, depth, count, value
    return DepthChoice(best_depth, best_count, best, threshold)


def _by_excess(bound: tuple[int, float]) -> float:
    return -bound[1]


def _goodput(choice: DepthChoice) -> float:
    return choice.goodput


def _evaluate(values: np.ndarray, prices: StepPrices) -> DepthChoice:
    """The best number of pairs among those of the depth of `values`, at least one."""
    depth, rows = values.shape
    ranked = values.flatten()
    ranked.sort()
    ranked = ranked[::-1]
    most = min(len(ranked), len(prices.step_s) - 1)
    goodput = np.add.accumulate(ranked[:most])
    goodput += rows
    goodput /= prices.step_s[1 : most + 1] + prices.pass_s * depth
    best = int(goodput.argmax())
    return DepthChoice(depth, best + 1, float(goodput[best]), float(ranked[best]))


def _excess_bounds(values: np.ndarray, prices: StepPrices, best: DepthChoice) -> list[float]:
    """By depth, upper bounds of tokens - best.goodput * cost: where one is not positive, no choice
    of that depth is better than `best`.

    Under C lies a line of slope b, so at price g = best.goodput no set of pairs is worth more than
    sum max(0, value - g b) above the line's foot. The slope only decides how sharp this is: it is
    that of C's hull right of `best`, or where `best` breaks even if that is less.
    """
    depth, rows = values.shape
    step_s, g = prices.step_s, best.goodput
    # No step that takes longer than all drafts together are worth can win.
    longest_s = (rows + float(np.add.reduce(values, axis=None))) / g
    most = min(values.size, int(step_s.searchsorted(longest_s, side="right")), len(step_s) - 1)
    # C at every `stride`-th count: it never falls, so between them it is at least the left one.
    stride = 1 + most // 512
    points_s = step_s[: most + 1 : stride]
    counts = _COUNTS[: most + 1 : stride]
    right = best.count // stride + 1
    slope_s = best.threshold / g
    if right < len(points_s):
        rise_s = (points_s[right:] - step_s[best.count]) / (counts[right:] - best.count)
        slope_s = min(slope_s, float(np.minimum.reduce(rise_s)))
    foot_s = float(np.minimum.reduce(points_s - slope_s * counts)) - slope_s * (stride - 1)
    price = g * slope_s
    worth = np.add.reduce(np.maximum(values, price), axis=1) - rows * price
    bound = rows - g * foot_s
    bounds = []
    for row_worth in worth.tolist():
        bound += row_worth - g * prices.pass_s
        bounds.append(bound)
    return bounds


def _take(values: np.ndarray, choice: DepthChoice) -> np.ndarray:
    """k of each row, int32: the `count` largest values; of equals, shallow before deep and then
    lower rows first."""
    taken = values >= choice.threshold
    surplus = int(np.count_nonzero(taken)) - choice.count
    num_drafts: np.ndarray = np.add.reduce(taken.view(np.int8), axis=0, dtype=np.int8)
    num_drafts = num_drafts.astype(np.int32)
    if surplus > 0:
        equals = np.flatnonzero(values == choice.threshold)[-surplus:]
        num_drafts -= np.bincount(equals % values.shape[1], minlength=values.shape[1])
    return num_drafts


def _even(
    values: np.ndarray, prices: StepPrices, num_drafts: np.ndarray, caps: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """The rows that draft, all equally deep: k of each row and G(k), of the two depths next to
    their mean the better one. None: they are so already, or no such choice has a price."""
    drafts = num_drafts > 0
    total, rows = int(np.add.reduce(num_drafts)), int(np.count_nonzero(drafts))
    most = -(-total // rows)
    if total == rows * most and total == rows * int(np.maximum.reduce(num_drafts)):
        return None  # they do already
    worth = (values[:most] @ drafts.astype(np.float64)).tolist()
    least_cap = int(np.minimum.reduce(caps))
    tokens, best, best_depth = float(values.shape[1]), 0.0, 0
    for depth in range(1, most + 1):
        tokens += worth[depth - 1]
        if depth < total // rows:
            continue
        count = depth * rows
        if depth > least_cap:
            count = int(np.add.reduce(np.minimum(caps, depth) * drafts))
        if count < len(prices.step_s):
            goodput = tokens / (float(prices.step_s[count]) + prices.pass_s * depth)
            if goodput > best:
                best, best_depth = goodput, depth
    if not best_depth:
        return None
    return np.minimum(caps, best_depth, dtype=np.int32) * drafts, best


def _without_late_rows(
    values: np.ndarray, prices: StepPrices, choice: DepthChoice, catch_up_cost_s: np.ndarray
) -> tuple[np.ndarray, StepPrices]:
    """Values and prices once rows whose drafts are not worth their debt draft nothing, and the
    others have paid."""
    taken = _take(values[: choice.depth], choice)
    owes = catch_up_cost_s > 0
    worth = np.where(_DEPTHS[: choice.depth] < taken, values[: choice.depth], 0.0).sum(axis=0)
    worth -= choice.goodput * _slope(prices, values.shape[1], choice.count) * taken
    pays = owes & (worth > choice.goodput * catch_up_cost_s)
    step_s = prices.step_s.copy()
    step_s[1:] += float(np.add.reduce(catch_up_cost_s * pays))
    return np.where(owes & ~pays, 0.0, values), structs.replace(prices, step_s=step_s)


def _within_blocks(
    values: np.ndarray, prices: StepPrices, choice: DepthChoice, slack: np.ndarray, free: int
) -> DepthChoice | None:
    """The best of at most `choice.depth` whose drafts beyond each row's `slack` are at most `free`.

    A draft beyond the slack is charged one position, as if blocks were divisible; the allocation of
    whole blocks afterwards may still shorten a draft."""
    values = values[: choice.depth]
    ranked = np.argsort(-values, axis=None, kind="stable")
    beyond = (_DEPTHS[: choice.depth] >= slack).ravel()[ranked]
    fits = int(np.searchsorted(np.add.accumulate(beyond), free, side="right"))
    if fits >= choice.count:
        return choice
    if not fits:
        return None
    held = _evaluate(values, StepPrices(prices.step_s[: fits + 1], prices.pass_s))
    return held if held.goodput > values.shape[1] / prices.step_s[0] else None


def _slope(prices: StepPrices, rows: int, count: int) -> float:
    """Seconds that one more token costs about `count`."""
    reach = 1 + rows // 4
    low, high = max(count - reach, min(count, 1)), min(count + reach, len(prices.step_s) - 1)
    return float(prices.step_s[high] - prices.step_s[low]) / (high - low) if high > low else 0.0


def _shadow_prices_at(
    prices: StepPrices, rows: int, count: int, depth: int, first_depth: int
) -> ShadowPrices:
    """Shared prices at the optimum: the slope of the cost, averaged over its stairs, and the rest
    of the step by row."""
    token_s = _slope(prices, rows, count)
    whole_s = float(prices.step_s[count]) + prices.pass_s * depth
    return ShadowPrices(max(whole_s - token_s * count, 0.0) / rows + _LEAST_S, token_s, first_depth)
