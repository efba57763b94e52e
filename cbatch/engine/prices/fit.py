"""Fit of prices to measured steps: a duration is a sum of curves and of products price * term.

Errors are relative, so that a long prefill does not outweigh a decode. Prices are fitted by
non-negative least squares (Lawson and Hanson 1974), in which a price without evidence is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.prices.terms import ADAPTIVE, DRAFT, HOST, MAX_IDLE_S, TARGET, Terms
from cbatch.core.request.errors import FieldError

# Errors above `_CLIP` times the median count less: in such a step the machine stalled.
_CLIP = 4.0
_ROUNDS = 6  # iterations of reweighted least squares
_MIN_PREDICTION_S = 1e-7  # avoids a division by zero
_MIN_T_SHARE = 0.01  # minimum of curve T, as a share of the shortest measured step
_TOKEN_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # points of curve T
_CONTEXT_KNOTS = (0, 256, 1024, 4096, 16384, 65536, 262144)  # points of curve C
_IDLE_KNOTS_S = (0.0, 0.01, 0.03, MAX_IDLE_S)  # points of curve W
# Fields of `CostProfile`: the points of a curve, and its values in seconds.
_SECONDS = {"tokens": "target_s", "contexts": "context_s", "idles_s": "after_idle_s"}


def fit_profile(samples: Sequence[StepSample], *, at_startup: bool = False) -> CostProfile:
    """Return the prices that fit the samples best. A duration of 0 was not measured.

    With `at_startup` the samples are few, and each is the median of equal steps: curve T has a
    point at every measured number of tokens, and only prices that are fields of the profile are
    fitted. Raises `FieldError` without samples.
    """
    timed = [sample for sample in samples if sample.target_s > 0]
    if not timed:
        raise FieldError("samples", "are none", "measure some steps")
    fields = CostProfile.__struct_fields__
    target, draft = (
        {name: value_of for name, value_of in terms.items() if not at_startup or name in fields}
        for terms in (TARGET, DRAFT)
    )
    works = [sample.work for sample in timed]
    tokens = np.array([work.target_tokens for work in works])
    curves = {"tokens": (tokens, np.unique(tokens).tolist())}
    if not at_startup:
        del target["context_token_s"]  # replaced by curve C (`contexts`)
        contexts = np.array([work.decode_context_tokens for work in works])
        idles_s = np.array([work.idle_s for work in works])
        curves = {
            "tokens": (tokens, _up_to(tokens.max(), _TOKEN_KNOTS)),
            "contexts": (contexts, _up_to(contexts.max(), _CONTEXT_KNOTS)),
            "idles_s": (idles_s, _IDLE_KNOTS_S),
        }
    columns = [np.ones((len(works), 1)), *(_interval_lengths(*curve) for curve in curves.values())]
    durations_s = np.array([sample.target_s for sample in timed])
    fit = fit_columns(np.concatenate([*columns, _matrix(target, works)], axis=1), durations_s)
    (base_s,), *slopes, rest = np.split(fit, np.cumsum([c.shape[1] for c in columns]))
    prices: dict[str, Any] = dict(zip(target, rest.tolist(), strict=True))
    for (name, (_, knots)), slope in zip(curves.items(), slopes, strict=True):
        line = np.cumsum([0.0, *(slope * np.diff(knots))])
        if name == "tokens":
            line = np.maximum(line + base_s, _MIN_T_SHARE * durations_s.min())
        prices |= {name: tuple(knots), _SECONDS[name]: tuple(line.tolist())}
    drafting = [s for s in samples if s.work.draft_depth or s.work.ingested_tokens]
    with_host = [sample for sample in samples if sample.host_s > 0]
    prices |= _fit_terms(draft, drafting, [sample.draft_s for sample in drafting])
    prices |= _fit_terms(HOST | ADAPTIVE, with_host, [sample.host_s for sample in with_host])
    further = {name: prices.pop(name) for name in [*prices] if name not in fields}
    return CostProfile(**prices, further=further)


def _fit_terms(
    terms: Terms, samples: Sequence[StepSample], seconds: Sequence[float]
) -> dict[str, float]:
    """Return the price of each term; the `ADAPTIVE` terms are 0 in steps without the adaptive
    policy."""
    if not samples:
        return {}
    columns = _matrix(terms, [sample.work for sample in samples])
    not_adaptive = [not sample.adaptive for sample in samples]
    columns[np.ix_(not_adaptive, [name in ADAPTIVE for name in terms])] = 0.0
    return dict(zip(terms, fit_columns(columns, np.array(seconds)).tolist(), strict=True))


def _matrix(terms: Terms, works: Sequence[StepWork]) -> np.ndarray:
    """Return the value of each term in each step, float64 [works, terms]."""
    rows = [[value_of(work) for value_of in terms.values()] for work in works]
    return np.array(rows, dtype=np.float64)


def fit_columns(columns: np.ndarray, durations_s: np.ndarray) -> np.ndarray:
    """Return the non-negative prices, float64 [columns], whose relative errors are smallest.

    Errors are relative to the prediction. If they were relative to the measurement, noise would
    bias every price downwards. Each round fits prices, then computes weights from the predictions.
    A step whose error is far above the median has a lower weight (Huber).
    """
    predicted_s = np.maximum(durations_s, _MIN_PREDICTION_S)
    weights = np.ones(len(durations_s))
    prices = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        scale = weights / predicted_s
        prices = nonnegative_least_squares(columns * scale[:, None], durations_s * scale)
        predicted_s = np.maximum(columns @ prices, _MIN_PREDICTION_S)
        errors = np.abs(durations_s / predicted_s - 1)
        full_weight_error = _CLIP * max(float(np.median(errors)), 1e-9)
        weights = np.sqrt(
            np.minimum(1.0, full_weight_error / np.maximum(errors, full_weight_error))
        )
    return prices


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return argmin |matrix x - values| over x >= 0, float64 [columns]: the active-set method of
    Lawson and Hanson (1974), chapter 23, on columns of unit length."""
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    x = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], np.bool_)
    tolerance = 1e-10 * float(np.linalg.norm(values) + 1e-300)
    for _ in range(10 * len(x)):
        gradient = np.where(free, -np.inf, scaled.T @ (values - scaled @ x))
        if np.max(gradient, initial=-np.inf) <= tolerance:
            break
        free[int(np.argmax(gradient))] = True
        while True:
            trial = np.zeros(len(x))
            trial[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            below = free & (trial <= 0)
            share = np.min(x[below] / (x[below] - trial[below]))
            x += share * (trial - x)
            free &= x > 1e-15
        x = trial
    return x / np.where(lengths > 0, lengths, 1.0)


def _interval_lengths(values: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """Return the part of each interval between two knots that is below each value, float64
    [values, knots - 1]."""
    return np.stack([np.clip(values - a, 0, b - a) for a, b in pairwise(knots)], axis=1)


def _up_to(maximum: int, knots: Sequence[int]) -> list[int]:
    """Return two knots or more that cover the range to `maximum`. The last interval is at least
    half of the range, so that the extrapolation does not follow noise."""
    return [knots[0], *(k for k in knots[1:] if 2 * k <= maximum), max(int(maximum), knots[0] + 1)]
