"""Prices from measured steps: durations as sums of curves and of what a step does, all positive.

Residuals are relative, so that a long prefill does not outweigh a decode, and prices are found by
non-negative least squares (Lawson and Hanson 1974): one that the steps do not show is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from cbatch.core.prices.step_work import StepSample, StepWork

_CLIP = 4.0  # usual errors; a step that is further off met a stall of the machine
_ROUNDS = 6
_LEAST_S = 1e-7


# By name of a price what it is paid for.
Features = dict[str, Callable[[StepWork], float]]


def fit_curves(
    curves: Sequence[tuple[np.ndarray, Sequence[float]]],
    features: Features,
    samples: Sequence[StepSample],
) -> tuple[list[list[float]], dict[str, float]]:
    """Seconds of `target_s` at the knots of each curve, and prices of the features.

    A curve is what to read it at, one value a step, and its ascending knots, between which it runs
    straight; it never falls. The first starts anywhere, the others at 0.
    """
    pieces = [_pieces(values, knots) for values, knots in curves]
    works = [sample.work for sample in samples]
    columns = [np.ones((len(works), 1)), *pieces, matrix(features, works)]
    durations_s = np.array([sample.target_s for sample in samples])
    found = fit_columns(np.concatenate(columns, axis=1), durations_s)
    ends = np.cumsum([column.shape[1] for column in columns[:-1]])
    first, *slopes, prices = np.split(found, ends)
    seconds = [
        np.cumsum([0.0, *(slope * np.diff(knots))])
        for slope, (_, knots) in zip(slopes, curves, strict=True)
    ]
    seconds[0] += first
    return [line.tolist() for line in seconds], dict(zip(features, prices.tolist(), strict=True))


def fit_drafting(features: Features, samples: Sequence[StepSample]) -> dict[str, float]:
    """Prices of `draft_s`, by the steps that draft or catch up; 0 where none does."""
    drafting = [s for s in samples if s.work.draft_depth or s.work.ingested_tokens]
    if not drafting:
        return dict.fromkeys(features, 0.0)
    columns = matrix(features, [s.work for s in drafting])
    found = fit_columns(columns, np.array([s.draft_s for s in drafting]))
    return dict(zip(features, found.tolist(), strict=True))


def matrix(features: Features, works: Sequence[StepWork]) -> np.ndarray:
    """float64 [works, features]"""
    return np.array([[of(work) for of in features.values()] for work in works], dtype=np.float64)


def fit_columns(columns: np.ndarray, durations_s: np.ndarray) -> np.ndarray:
    """Non-negative prices, float64 [columns]. Errors are relative to what is predicted (to what was
    measured, noise would make every price too small), so weights are found by turns; steps that are
    off by much more than usual count less the further off they are (Huber)."""
    expected_s = np.maximum(durations_s, _LEAST_S)
    weights = np.ones(len(durations_s))
    found = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        scale = weights / expected_s
        found = nonnegative_least_squares(columns * scale[:, None], durations_s * scale)
        expected_s = np.maximum(columns @ found, _LEAST_S)
        errors = np.abs(durations_s / expected_s - 1)
        most = _CLIP * max(float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, most / np.maximum(errors, most)))
    return found


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """argmin |matrix x - values| over x >= 0, float64 [columns]: the active-set method of Lawson
    and Hanson (1974), chapter 23, on columns of unit length."""
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    found = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], np.bool_)
    tolerance = 1e-10 * float(np.linalg.norm(values) + 1e-300)
    for _ in range(10 * len(found)):
        gradient = np.where(free, -np.inf, scaled.T @ (values - scaled @ found))
        if np.max(gradient, initial=-np.inf) <= tolerance:
            break
        free[int(np.argmax(gradient))] = True
        while True:
            trial = np.zeros(len(found))
            trial[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            below = free & (trial <= 0)
            share = np.min(found[below] / (found[below] - trial[below]))
            found += share * (trial - found)
            free &= found > 1e-15
        found = trial
    return found / np.where(lengths > 0, lengths, 1.0)


def _pieces(values: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """float64 [values, knots - 1]: how much of each piece between two knots lies below."""
    return np.stack([np.clip(values - a, 0, b - a) for a, b in pairwise(knots)], axis=1)
