"""Which rows draft how many tokens, so that a step commits the most tokens a second.

This is what the `goodput` policy (goodput_policy.py) maximises when it decides.

With S_ij the chance that row i's first j drafts survive, C(n) the seconds of a step with n drafts
in all, and c0 those of a sequential pass of the drafter, the best k maximises

    G(k) = sum_i w_i (1 + sum_{j <= k_i} S_ij) / (C(sum_i k_i) + c0 max_i k_i).

For a given depth the n best pairs (i, j) are the n largest w_i S_ij, and since S falls along a row
they are a prefix of each. So every depth and every least worth of a pair is one candidate: how many
pairs there are, what they are worth together, what that costs; the best of all is taken (C is a
staircase, so the first local one would be a trap). Worths are told apart as finely as `_GRADES`
says, which spares the sorting. (Fractional program: Dinkelbach 1967; global top-n: TETRIS, arXiv
2502.15197.)

The weights w_i mend the closed loop. With slots kept full, throughput is slots * H / T with H the
harmonic mean of the tokens per step, and its optimum is that every row minimises its own cost per
token at shared prices: (slot + token k) / m_i(k), m_i(k) = 1 + sum_{j <= k} S_ij. That minimum is
w_i; without it easy rows leave early and hard ones fill the batch.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.speculation.cost_model import StepPrices

_GRADES = 64  # of worth, from 0 to the most, narrower towards 0


class ShadowPrices(msgspec.Struct, frozen=True):
    """What a decision leaves for the next: seconds that a row's slot and a drafted token cost (its
    shadow prices, as in linear programming: what one more of a shared resource would be worth)."""

    slot_s: float
    token_s: float


class LookaheadDecision(msgspec.Struct, frozen=True):
    """`num_drafts` is k of each row, int32 [rows]; `gain` the expected speed over drafting nothing,
    less 1, and 0 if that is what was decided."""

    num_drafts: np.ndarray
    gain: float
    shadow_prices: ShadowPrices
    threshold: float = np.inf  # lambda: a survival of about so much was worth a draft
    tokens_per_s: float | None = None  # expected, weighted; None: nobody drafts


def decide(
    survival: np.ndarray,
    caps: np.ndarray,
    prices: StepPrices,
    shadow_prices: ShadowPrices | None = None,
) -> LookaheadDecision:
    """k of each row for the best expected goodput of the step.

    `survival` is float64 [depth, rows], non-increasing along the depth; `caps` int32 [rows].
    `prices` are of a step of no draft, of one, and so on: of drafts beyond its end no more than
    these are counted on, and somebody has to cut them. `shadow_prices` are the previous decision's,
    None at first.
    """
    depth, rows = survival.shape
    depths = np.arange(1.0, depth + 1)[:, None]
    values = np.where(depths <= caps, survival, 0.0)
    if shadow_prices is not None and rows > 1:
        values *= weigh(values, shadow_prices)
    most_worth = float(np.maximum.reduce(values[0])) or 1.0
    grades = np.sqrt(values * ((_GRADES - 1) ** 2 / most_worth)).astype(np.int64)
    counts, worths = _candidates(values, grades)
    step_s, most = prices.step_s, len(prices.step_s) - 1
    counted = np.minimum(counts, most)
    goodput = rows + worths * (counted / np.maximum(counts, 1))
    goodput /= step_s[counted] + prices.pass_s * depths
    goodput[counts == 0] = 0.0
    best, candidate = divmod(int(goodput.argmax()), _GRADES - 1)
    tokens_per_s = float(goodput[best, candidate])
    gain = tokens_per_s * float(step_s[0]) / rows - 1
    if gain <= 0:
        nobody = np.zeros(rows, dtype=np.int32)
        return LookaheadDecision(nobody, 0.0, _shadow_prices_at(prices, rows, 0, 0))
    grade = _GRADES - 1 - candidate
    return LookaheadDecision(
        np.add.reduce(grades[: best + 1] >= grade, axis=0, dtype=np.int32),
        gain,
        _shadow_prices_at(prices, rows, int(counted[best, candidate]), best + 1),
        most_worth * (grade / (_GRADES - 1)) ** 2,
        tokens_per_s,
    )


def gain_of_alike(chances: np.ndarray, alike: int, rows: int, prices: StepPrices) -> float:
    """What the best common depth of `alike` rows with these chances of survival, by depth, would
    gain over drafting nothing, if the others of `rows` draft nothing."""
    depths = np.arange(1, len(chances) + 1)
    drafts = np.minimum(alike * depths, len(prices.step_s) - 1)
    goodput = rows + alike * np.add.accumulate(chances)
    goodput /= prices.step_s[drafts] + prices.pass_s * depths
    return float(np.maximum.reduce(goodput) * prices.step_s[0]) / rows - 1


def weigh(values: np.ndarray, shadow_prices: ShadowPrices) -> np.ndarray:
    """w_i, float64 [rows] of mean 1, for survival [depth, rows] masked by the caps."""
    tokens = np.add.accumulate(values, axis=0)
    tokens += 1
    cost_s = shadow_prices.slot_s + shadow_prices.token_s * np.arange(1.0, len(values) + 1)[:, None]
    weights: np.ndarray = np.minimum.reduce(cost_s / tokens, axis=0, initial=shadow_prices.slot_s)
    weights *= len(weights) / float(np.add.reduce(weights))
    return weights


def _candidates(values: np.ndarray, grades: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each depth and each least grade, the best first and the last without worth left out: how
    many pairs, and what they are worth together. [depth, _GRADES - 1] each."""
    depth, size = len(values), len(values) * _GRADES
    cells = (grades + _GRADES * np.arange(depth)[:, None]).ravel()
    found = []
    for weights in (None, values.ravel()):
        sums = np.bincount(cells, weights, size).reshape(depth, _GRADES)[:, :0:-1]
        found.append(np.add.accumulate(np.add.accumulate(sums, axis=1), axis=0))
    return found[0], found[1]


def _shadow_prices_at(prices: StepPrices, rows: int, count: int, depth: int) -> ShadowPrices:
    """Shared prices at the optimum: the slope of the cost, averaged over its stairs, and the rest
    of the step by row."""
    step_s, reach = prices.step_s, 1 + rows // 4
    low, high = max(count - reach, min(count, 1)), min(count + reach, len(step_s) - 1)
    token_s = float(step_s[high] - step_s[low]) / (high - low) if high > low else 0.0
    rest_s = float(step_s[count]) + prices.pass_s * depth - token_s * count
    return ShadowPrices(max(rest_s, 0.01 * float(step_s[0])) / rows, token_s)
