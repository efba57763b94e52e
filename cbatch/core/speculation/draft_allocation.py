"""The choice of (row, depth) pairs with which a step commits the most tokens a second.

S_ij is the chance that row i's first j drafts are accepted. C(n) is the duration of a step with n
drafts in all, and c0 the duration of a sequential pass of the drafter. The best k maximises

    G(k) = sum_i w_i (1 + sum_{j <= k_i} S_ij) / (C(sum_i k_i) + c0 max_i k_i).

For a given maximum depth, the n best pairs (i, j) have the n largest worths w_i S_ij. They are a
prefix of each row, because S falls along a row. A candidate is a maximum depth and a least worth.
All candidates are compared, because C is a staircase with many local optima. Worths are rounded to
`_GRADES` grades, which replaces sorting. (Fractional program: Dinkelbach 1967; global top-n:
TETRIS, arXiv 2502.15197.)

The weights w_i prevent a bias: without them easy rows leave early and hard rows fill the batch. If
slots are always full, throughput is slots * H / T: H is the harmonic mean of the rows' tokens per
step, T the step's duration. At the optimum each row minimises its own cost per token:
(slot + token k) / m_i(k) with m_i(k) = 1 + sum_{j <= k} S_ij. All rows share the prices `slot` and
`token`. The weight w_i is proportional to the minimum.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.prices.cost_model import StepPrices

_GRADES = 64  # number of grades of worth, from 0 to the highest worth, finer towards 0


class LookaheadDecision(msgspec.Struct, frozen=True):
    """`num_drafts` is k of each row, int32 [rows]. `gain` is the expected speed relative to no
    drafts, minus 1; 0 if no row drafts."""

    num_drafts: np.ndarray
    gain: float = 0.0
    threshold: float = np.inf  # lambda: the least weighted survival that was worth a draft
    tokens_per_s: float | None = None  # expected, weighted; None: no row drafts

    @property
    def total_drafts(self) -> int:
        return int(np.add.reduce(self.num_drafts))


def decide(
    survival: np.ndarray,
    max_drafts: np.ndarray,
    prices: StepPrices,
    before: LookaheadDecision | None = None,
) -> LookaheadDecision:
    """Return k of each row for the most expected tokens per second. Rows are weighted by `weights`,
    if the previous decision `before` is given. `survival` is float64 [depth, rows], non-increasing
    along the depth; `max_drafts` int32 [rows]. Drafts past the end of `prices` count for nothing:
    the caller cuts them."""
    depth, rows = survival.shape
    depths = np.arange(1.0, depth + 1)[:, None]
    values = np.where(depths <= max_drafts, survival, 0.0)
    if before is not None:
        values *= weights(values, prices, before)
    most_worth = float(np.maximum.reduce(values[0])) or 1.0
    grades = np.sqrt(values * ((_GRADES - 1) ** 2 / most_worth)).astype(np.int64)
    counts, worths = _candidates(values, grades)
    step_s = prices.step_s
    counted = np.minimum(counts, len(step_s) - 1)
    speeds = rows + worths * (counted / np.maximum(counts, 1))
    speeds /= step_s[counted] + prices.pass_s * depths
    speeds[counts == 0] = 0.0
    best, candidate = divmod(int(speeds.argmax()), _GRADES - 1)
    tokens_per_s, grade = float(speeds[best, candidate]), _GRADES - 1 - candidate
    gain = tokens_per_s * float(step_s[0]) / rows - 1
    if gain <= 0:
        return LookaheadDecision(np.zeros(rows, dtype=np.int32))
    num_drafts = np.add.reduce(grades[: best + 1] >= grade, axis=0, dtype=np.int32)
    threshold = most_worth * (grade / (_GRADES - 1)) ** 2
    return LookaheadDecision(num_drafts, gain, threshold, tokens_per_s)


def weights(values: np.ndarray, prices: StepPrices, before: LookaheadDecision) -> np.ndarray:
    """Return w_i, float64 [rows] of mean 1, for survival [depth, rows] masked by `max_drafts`."""
    depth, rows = values.shape
    plain_s = float(prices.step_s[0])
    drafts = min(max(before.total_drafts, 1), len(prices.step_s) - 1)
    token_s = (float(prices.step_s[drafts]) - plain_s) / max(drafts, 1)
    deepest = int(np.maximum.reduce(before.num_drafts, initial=0))
    slot_s = (plain_s + prices.pass_s * deepest) / rows
    costs_s = slot_s + token_s * np.arange(1.0, depth + 1)[:, None]
    costs_s = costs_s / (1 + np.add.accumulate(values, axis=0))
    lowest_s: np.ndarray = np.minimum.reduce(costs_s, axis=0, initial=slot_s)
    lowest_s *= rows / float(np.add.reduce(lowest_s))
    return lowest_s


def _candidates(values: np.ndarray, grades: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of pairs and their total worth, [depth, _GRADES - 1] each, for each maximum
    depth and each least grade. The highest grade is first; grade 0 is left out."""
    depth, size = len(values), len(values) * _GRADES
    cells = (grades + _GRADES * np.arange(depth)[:, None]).ravel()
    totals = []
    for worths in (None, values.ravel()):
        sums = np.bincount(cells, worths, size).reshape(depth, _GRADES)[:, :0:-1]
        totals.append(np.add.accumulate(np.add.accumulate(sums, axis=1), axis=0))
    return totals[0], totals[1]
