"""Prices from measured steps: durations as sums of curves and of what a step does, all positive.

Residuals are relative, so that a long prefill does not outweigh a decode, and prices are found by
non-negative least squares (Lawson and Hanson 1974): a price that the steps do not show is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.prices.terms import ADAPTIVE, DRAFT, HOST, MOST_IDLE_S, TARGET, Terms
from cbatch.core.request.errors import FieldError

_CLIP = 4.0  # usual errors; a step that is further off met a stall of the machine
_ROUNDS = 6
_LEAST_S = 1e-7
_LEAST_SHARE = 0.01  # of the shortest step: the least value of T
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CONTEXT_KNOTS = (0, 256, 1024, 4096, 16384, 65536, 262144)
_IDLE_KNOTS_S = (0.0, 0.01, 0.03, MOST_IDLE_S)
# The field of a curve's seconds, by that of its points.
_SECONDS = {"tokens": "target_s", "contexts": "context_s", "idles_s": "after_idle_s"}


def fit_profile(samples: Sequence[StepSample], *, start: bool = False) -> CostProfile:
    """Return the prices of a machine on which steps took so long. A duration of 0 was not measured.

    `start`: the samples are few, each a median of equal steps. T then has a point at every number
    of tokens, and only the terms that are fields of the profile are told apart. Raises `FieldError`
    without samples.
    """
    timed = [sample for sample in samples if sample.target_s > 0]
    if not timed:
        raise FieldError("samples", "are none", "measure some steps")
    own = CostProfile.__struct_fields__
    target, draft = (
        {name: of for name, of in terms.items() if not start or name in own}
        for terms in (TARGET, DRAFT)
    )
    works = [sample.work for sample in timed]
    tokens = np.array([work.target_tokens for work in works])
    curves = {"tokens": (tokens, np.unique(tokens).tolist())}
    if not start:
        del target["context_token_s"]  # C replaces it
        contexts = np.array([work.decode_context_tokens for work in works])
        idles_s = np.array([work.idle_s for work in works])
        curves = {
            "tokens": (tokens, _up_to(tokens.max(), _KNOTS)),
            "contexts": (contexts, _up_to(contexts.max(), _CONTEXT_KNOTS)),
            "idles_s": (idles_s, _IDLE_KNOTS_S),
        }
    columns = [np.ones((len(works), 1)), *(_pieces(*curve) for curve in curves.values())]
    durations_s = np.array([sample.target_s for sample in timed])
    found = fit_columns(np.concatenate([*columns, _matrix(target, works)], axis=1), durations_s)
    (base_s,), *slopes, rest = np.split(found, np.cumsum([c.shape[1] for c in columns]))
    prices: dict[str, Any] = dict(zip(target, rest.tolist(), strict=True))
    for (name, (_, knots)), slope in zip(curves.items(), slopes, strict=True):
        line = np.cumsum([0.0, *(slope * np.diff(knots))])
        if name == "tokens":
            line = np.maximum(line + base_s, _LEAST_SHARE * durations_s.min())
        prices |= {name: tuple(knots), _SECONDS[name]: tuple(line.tolist())}
    drafting = [s for s in samples if s.work.draft_depth or s.work.ingested_tokens]
    hosted = [sample for sample in samples if sample.host_s > 0]
    prices |= _fit_terms(draft, drafting, [sample.draft_s for sample in drafting])
    prices |= _fit_terms(HOST | ADAPTIVE, hosted, [sample.host_s for sample in hosted])
    further = {name: prices.pop(name) for name in [*prices] if name not in own}
    return CostProfile(**prices, further=further)


def _fit_terms(
    terms: Terms, samples: Sequence[StepSample], seconds: Sequence[float]
) -> dict[str, float]:
    if not samples:
        return {}
    columns = _matrix(terms, [sample.work for sample in samples])
    others = [not sample.controlled for sample in samples]
    columns[np.ix_(others, [name in ADAPTIVE for name in terms])] = 0.0
    return dict(zip(terms, fit_columns(columns, np.array(seconds)).tolist(), strict=True))


def _matrix(terms: Terms, works: Sequence[StepWork]) -> np.ndarray:
    """float64 [works, terms]"""
    return np.array([[of(work) for of in terms.values()] for work in works], dtype=np.float64)


def fit_columns(columns: np.ndarray, durations_s: np.ndarray) -> np.ndarray:
    """Return non-negative prices, float64 [columns].

    Errors are relative to the prediction: relative to the measured value, noise would make every
    price too small. So weights and prices are found in turn. Steps with far larger errors than
    usual count less, the larger these are (Huber).
    """
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
    """Return argmin |matrix x - values| over x >= 0, float64 [columns]: the active-set method of
    Lawson and Hanson (1974), chapter 23, on columns of unit length."""
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


def _up_to(most: int, knots: Sequence[int]) -> list[int]:
    """Return two knots or more, the last no less than `most`. The last piece is at least half as
    long as what precedes it, or noise would say how the line continues."""
    return [knots[0], *(k for k in knots[1:] if 2 * k <= most), max(int(most), knots[0] + 1)]
