"""The choice of (row, depth) pairs with which a step commits the most tokens a second.

S_ij is the probability that row i's first j drafts are accepted. C(n) is the duration of a step
with n drafts in all, and c0 that of one sequential pass of the drafter. The best k maximises

    G(k) = sum_i w_i (1 + sum_{j <= k_i} S_ij) / (C(sum_i k_i) + c0 max_i k_i).

The value of draft (i, j) is w_i S_ij. For a given maximum depth, a step of n drafts takes the n
drafts of the highest values: in each row the first ones, because S_ij falls with j. So a candidate
k is given by a maximum depth and a minimum value. All candidates are compared: C has a step at the
first draft, so there are several local optima. Instead of sorting, values are rounded to `_GRADES`
grades.
(Fractional program: Dinkelbach 1967; global top-n: TETRIS, arXiv 2502.15197.)

The weights w_i prevent a bias: without them, rows of high acceptance finish early and the batch
fills with rows of low acceptance. If slots are always full, throughput is slots * H / T: H is the
harmonic mean of the rows' tokens per step, T the step's duration. At the optimum each row minimises
its own cost per token, (slot + token k) / m_i(k) with m_i(k) = 1 + sum_{j <= k} S_ij. The prices
`slot` and `token` are the same for all rows. w_i is proportional to the minimum.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.prices.step_costs import StepPrices

_GRADES = 64  # grades from value 0 to the highest value, finer towards 0


class LookaheadDecision(msgspec.Struct, frozen=True):
    """`num_drafts` is k of each row, int32 [rows]. `gain` is the expected speed relative to no
    drafts, minus 1; 0 if no row drafts."""

    num_drafts: np.ndarray
    gain: float = 0.0
    threshold: float = np.inf  # lambda: the smallest value of a chosen draft
    tokens_per_s: float | None = None  # expected, weighted; None: no row drafts

    @property
    def total_drafts(self) -> int:
        return int(np.add.reduce(self.num_drafts))


def decide(
    survival: np.ndarray,
    max_drafts: np.ndarray,
    prices: StepPrices,
    previous: LookaheadDecision | None = None,
    *,
    num_waiting: int = 0,
) -> LookaheadDecision:
    """Return k of each row for the most expected tokens per second. `num_waiting` more requests
    wait for the step: each is worth as much as a row without drafts. With the `previous` decision,
    rows are weighted by `weights`. `survival` is float64 [depth, rows], non-increasing along the
    depth; `max_drafts` int32 [rows]. More drafts than `prices` has get no value: the caller cuts
    them."""
    depth, rows = survival.shape
    depths = np.arange(1.0, depth + 1)[:, None]
    values = survival * (depths <= max_drafts)
    if previous is not None:
        values *= weights(values, prices, previous)
    max_value = float(np.maximum.reduce(values[0])) or 1.0
    grades = np.sqrt(values * ((_GRADES - 1) ** 2 / max_value)).astype(np.int64)
    counts, total_values = _candidates(values, grades)
    step_s = prices.step_s
    priced_counts = np.minimum(counts, len(step_s) - 1)
    speeds = (rows + num_waiting) + total_values * (priced_counts / np.maximum(counts, 1))
    seconds = step_s[priced_counts] + prices.pass_s * depths
    speeds /= seconds
    speeds[counts == 0] = 0.0
    max_depth, column = divmod(int(speeds.argmax()), _GRADES - 1)  # max_depth from 0
    speed, min_grade = float(speeds[max_depth, column]), _GRADES - 1 - column
    gain = speed * float(step_s[0]) / (rows + num_waiting) - 1
    if gain <= 0:
        return LookaheadDecision(np.zeros(rows, dtype=np.int32))
    num_drafts = np.add.reduce(grades[: max_depth + 1] >= min_grade, axis=0, dtype=np.int32)
    threshold = max_value * (min_grade / (_GRADES - 1)) ** 2
    tokens_per_s = speed - num_waiting / float(seconds[max_depth, column])
    return LookaheadDecision(num_drafts, gain, threshold, tokens_per_s)


def weights(survival: np.ndarray, prices: StepPrices, previous: LookaheadDecision) -> np.ndarray:
    """Return w_i, float64 [rows] of mean 1, for `survival`, [depth, rows], 0 past `max_drafts`."""
    depth, rows = survival.shape
    plain_s = float(prices.step_s[0])
    drafts = min(max(previous.total_drafts, 1), len(prices.step_s) - 1)
    token_s = (float(prices.step_s[drafts]) - plain_s) / max(drafts, 1)
    num_passes = int(np.maximum.reduce(previous.num_drafts, initial=0))
    slot_s = (plain_s + prices.pass_s * num_passes) / rows
    costs_s = slot_s + token_s * np.arange(1.0, depth + 1)[:, None]
    costs_s = costs_s / (1 + np.add.accumulate(survival, axis=0))
    min_costs_s: np.ndarray = np.minimum.reduce(costs_s, axis=0, initial=slot_s)
    min_costs_s *= rows / float(np.add.reduce(min_costs_s))
    return min_costs_s


def _candidates(values: np.ndarray, grades: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of drafts and their total value, [depth, _GRADES - 1] each, of every
    candidate: a row per maximum depth, a column per minimum grade, the highest first, without 0."""
    depth, size = len(values), len(values) * _GRADES
    cells = (grades + _GRADES * np.arange(depth)[:, None]).ravel()
    totals = []
    for summands in (None, values.ravel()):  # None: count
        sums = np.bincount(cells, summands, size).reshape(depth, _GRADES)[:, :0:-1]
        totals.append(np.add.accumulate(np.add.accumulate(sums, axis=1), axis=0))
    return totals[0], totals[1]
