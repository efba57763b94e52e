"""A cost model fitted to measured steps: durations as sums of what a step does, all positive.

    target_s = T(tokens) + C(context tokens that decoding rows read) + W(idle seconds before it)
             + sum of price * feature
    draft_s  = sum of price * feature                 the drafter's passes
    host_s   = sum of price * feature                 the loop around the executor

`target_s` is what the executor does besides drafting. T, C and W are piecewise linear and never
fall (padding and caches make them bend); the features are named in `TARGET`, `DRAFT` and `HOST`.
Residuals are relative, so that a long prefill does not outweigh a decode, and prices are found by
non-negative least squares (Lawson and Hanson 1974): one that the steps do not show is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cbatch.core.cost import CostProfile
from cbatch.core.errors import FieldError
from sim.costs import StepWork
from sim.tables import Curve

FORMAT, VERSION = "cbatch-calibration", 4
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CONTEXT_KNOTS = (0, 256, 1024, 4096, 16384, 65536, 262144)
_IDLE_KNOTS_S = (0.0, 0.01, 0.03, 0.1)
# Of what decoding rows read, the share that is not in caches, by steps since a chunk was computed.
_COLD = (1.0, 1.0, 0.5, 0.25, 0.125)
_CLIP = 4.0  # usual errors; a step that is further off met a stall of the machine
_ROUNDS = 6
_LEAST_S = 1e-7
_LEAST_IDLE_S = 1e-4

TARGET = (
    "row",
    "chunk",  # a row that prefills
    "logit",
    "cold_context_token",  # as `_COLD` says
    "padded_context_token",  # rows times the longest context
    "prefill_context_token",
    "prefill_pair",
    "verifying_step",
    "verifying_row",
    "draft_token",  # beyond a token
    "verified_context_token",  # beyond a context token
    "admission",
)
DRAFT = (
    "drafting_step",
    "depth",
    "drafting_row",
    "draft_token",
    "context_token",
    "context_token_pass",
    "ingesting_step",
    "ingested_token",
)
HOST = (
    "step",
    "cold_step",
    "idle_s",  # up to the last of `_IDLE_KNOTS_S`
    "row",
    "admission",
    "admitting_step",
    "drafting_step",
    "drafting_row",
    "draft_token",
    "controlled_step",  # whose depths `goodput` chooses
    "controlled_row",
    "controlled_admission",
)


def cold(work: StepWork) -> float:
    since = work.steps_since_prefill
    return _COLD[since] if since < len(_COLD) else 0.0


def target_features(work: StepWork) -> tuple[float, ...]:
    """As `TARGET` names them."""
    verified = work.draft_tokens > 0
    return (
        work.rows,
        work.rows - work.decode_rows,
        work.logit_tokens,
        work.decode_context_tokens * cold(work),
        work.decode_rows * work.decode_longest_tokens,
        work.prefill_context_tokens,
        work.prefill_pairs,
        verified,
        work.decode_rows * verified,
        work.draft_tokens,
        work.decode_context_tokens * verified,
        work.admitted,
    )


def draft_features(work: StepWork) -> tuple[float, ...]:
    """As `DRAFT` names them."""
    drafts = work.draft_depth > 0
    return (
        drafts,
        work.draft_depth,
        work.decode_rows * drafts,
        work.draft_tokens,
        work.draft_context_tokens,
        work.draft_context_tokens * work.draft_depth,
        work.ingested_tokens > 0,
        work.ingested_tokens,
    )


def host_features(work: StepWork, controlled: bool) -> tuple[float, ...]:
    """As `HOST` names them; `controlled`: `goodput` chooses depths."""
    admitted, drafts = work.admitted, work.draft_depth > 0
    drafting = drafts, work.decode_rows * drafts, work.draft_tokens
    idle_s = min(work.idle_s, _IDLE_KNOTS_S[-1])
    found = 1, cold(work), idle_s, work.rows, admitted, admitted > 0, *drafting
    return (*found, 1, work.rows, admitted) if controlled else (*found, 0, 0, 0)


class StepSample(msgspec.Struct, frozen=True):
    """One measured step. `host_s` is all the time of its turn that the executor did not measure;
    `controlled` as in `host_features`."""

    work: StepWork
    draft_s: float
    target_s: float
    host_s: float
    controlled: bool = False


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Piecewise linear: at `at[i]` it is `seconds[i]`; it never falls."""

    at: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise(self.at))
        rising = all(a <= b for a, b in pairwise((0.0, *self.seconds)))
        if not (ascending and rising and len(self.at) == len(self.seconds) >= 2):
            raise FieldError("prices", "have a line that does not rise", "give ascending points")


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """T, C and W; the others are seconds by name of their feature."""

    tokens: Line
    context: Line
    idle: Line
    target_s: dict[str, float]
    draft_s: dict[str, float]
    host_s: dict[str, float]

    def __post_init__(self) -> None:
        for field, found, names in (
            ("target_s", self.target_s, TARGET),
            ("draft_s", self.draft_s, DRAFT),
            ("host_s", self.host_s, HOST),
        ):
            if set(found) != set(names) or not all(0 <= s < np.inf for s in found.values()):
                remedy = f"give seconds of 0 or more for {', '.join(names)}"
                raise FieldError(f"prices.{field}", "are not all there", remedy)


class CalibratedCost:
    """The cost model (see `sim.costs`) of such prices, the host's share among them; `controlled`:
    of steps whose depths `goodput` chooses."""

    def __init__(self, prices: Prices, *, controlled: bool = False) -> None:
        self._controlled = controlled
        self._tokens = Curve(prices.tokens.at, prices.tokens.seconds)
        self._context = Curve(prices.context.at, prices.context.seconds)
        self._idle = prices.idle
        self._target = [prices.target_s[name] for name in TARGET]
        self._draft = [prices.draft_s[name] for name in DRAFT]
        self._host = [prices.host_s[name] for name in HOST]

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        target_s = self._tokens(work.decode_tokens + work.prefill_tokens)
        target_s += self._context(work.decode_context_tokens)
        if work.idle_s > _LEAST_IDLE_S:
            target_s += float(np.interp(work.idle_s, self._idle.at, self._idle.seconds))
        target_s += sum(map(mul, self._target, target_features(work)))
        host_s = sum(map(mul, self._host, host_features(work, self._controlled)))
        if work.draft_depth or work.ingested_tokens:
            return sum(map(mul, self._draft, draft_features(work))), target_s, host_s
        return 0.0, target_s, host_s


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Of predicted durations against measured ones, whole steps."""

    steps: int
    total: float  # predicted / measured - 1, of all steps together
    p50: float  # of absolute relative errors of single steps
    p90: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `cbatch calibrate` writes and `cbatch sim --cost` reads."""

    model: str
    draft: str | None
    machine: dict[str, Any]
    versions: dict[str, str]
    engine: dict[str, Any]  # fields of the scheduler's configuration
    prices: Prices
    profile: CostProfile | None  # that `goodput` starts with
    max_rows: int  # in one measured step; with more tokens than measured the last line goes on
    fitted: Accuracy
    held_out: Accuracy  # on compositions that nothing was fitted to
    format: str = FORMAT
    version: int = VERSION


def read_calibration(path: str | Path) -> Calibration:
    """Raises `FieldError` if the file is not one, or of another version."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except (OSError, msgspec.MsgspecError, FieldError) as error:
        raise FieldError(
            "--cost", f"{path} is no calibration ({error})", "write one with cbatch calibrate"
        ) from error
    if (found.format, found.version) != (FORMAT, VERSION):
        raise FieldError(
            "--cost", f"{path} is {found.format} {found.version}", "calibrate this version anew"
        )
    return found


def write_calibration(path: Path, found: Calibration) -> None:
    """So that `read_calibration` reads it. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def fit_prices(samples: Sequence[StepSample]) -> Prices:
    """Raises `FieldError` if there are no steps."""
    if not samples:
        raise FieldError("samples", "are none", "measure some steps")
    tokens = np.array([s.work.decode_tokens + s.work.prefill_tokens for s in samples])
    contexts = np.array([s.work.decode_context_tokens for s in samples])
    knots = _up_to(tokens.max(), _KNOTS), _up_to(contexts.max(), _CONTEXT_KNOTS), _IDLE_KNOTS_S
    idles_s = np.array([s.work.idle_s for s in samples])
    lines = [_pieces(each, at) for each, at in zip((tokens, contexts, idles_s), knots, strict=True)]
    # T has a price of its own where there is but one token; C and W begin at 0.
    columns = [np.ones((len(samples), 1)), *lines, _features(target_features, samples)]
    found = _fit(np.concatenate(columns, axis=1), np.array([s.target_s for s in samples]))
    ends = np.cumsum([column.shape[1] for column in columns[:-1]])
    first, *slopes, others = np.split(found, ends)
    drafting = [s for s in samples if s.work.draft_depth or s.work.ingested_tokens]
    drafts = np.zeros(len(DRAFT))
    if drafting:
        durations_s = np.array([s.draft_s for s in drafting])
        drafts = _fit(_features(draft_features, drafting), durations_s)
    hosts = np.array([host_features(s.work, s.controlled) for s in samples], dtype=np.float64)
    host = _fit(hosts, np.array([s.host_s for s in samples]))
    return Prices(
        tokens=_line(knots[0], slopes[0], float(first[0])),
        context=_line(knots[1], slopes[1]),
        idle=_line(knots[2], slopes[2]),
        target_s=dict(zip(TARGET, others.tolist(), strict=True)),
        draft_s=dict(zip(DRAFT, drafts.tolist(), strict=True)),
        host_s=dict(zip(HOST, host.tolist(), strict=True)),
    )


def accuracy(prices: Prices, samples: Sequence[StepSample]) -> Accuracy:
    costs = [CalibratedCost(prices, controlled=controlled) for controlled in (False, True)]
    predicted = np.array([sum(costs[s.controlled].step_s(s.work)) for s in samples])
    measured = np.array([s.draft_s + s.target_s + s.host_s for s in samples])
    p50, p90 = np.percentile(np.abs(predicted / measured - 1), (50, 90)).tolist()
    total = float(predicted.sum() / measured.sum() - 1)
    return Accuracy(steps=len(samples), total=total, p50=p50, p90=p90)


def _up_to(most: int, knots: Sequence[int]) -> list[int]:
    """Two at least, the last of them no less than `most`; what lies between two is no less than
    half of what lies before, or noise says how the line goes on."""
    return [knots[0], *(k for k in knots[1:] if 2 * k <= most), max(int(most), knots[0] + 1)]


def _pieces(values: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """float64 [values, knots - 1]: how much of each piece between two knots lies below."""
    return np.stack([np.clip(values - a, 0, b - a) for a, b in pairwise(knots)], axis=1)


def _line(knots: Sequence[float], slopes: np.ndarray, first_s: float = 0.0) -> Line:
    """Of the slopes of `_pieces`."""
    seconds = first_s + np.cumsum([0.0, *(slopes * np.diff(knots))])
    return Line(tuple(map(float, knots)), tuple(seconds.tolist()))


def _features(
    of: Callable[[StepWork], tuple[float, ...]], samples: Sequence[StepSample]
) -> np.ndarray:
    return np.array([of(sample.work) for sample in samples], dtype=np.float64)


def _fit(features: np.ndarray, durations_s: np.ndarray) -> np.ndarray:
    """Non-negative prices, float64 [columns]. Errors are relative to what is predicted (to what was
    measured, noise would make every price too small), so weights are found by turns; steps that are
    off by much more than usual count less the further off they are (Huber)."""
    expected_s = np.maximum(durations_s, _LEAST_S)
    weights = np.ones(len(durations_s))
    found = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        scale = weights / expected_s
        found = nonnegative_least_squares(features * scale[:, None], durations_s * scale)
        expected_s = np.maximum(features @ found, _LEAST_S)
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
