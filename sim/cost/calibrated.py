"""A cost model fitted to measured steps: durations as sums of what a step does, all positive.

    target_s = T(tokens) + C(context tokens that decoding rows read) + W(idle seconds before it)
             + sum of price * feature
    draft_s  = sum of price * feature                 the drafter's passes
    host_s   = sum of price * feature                 the loop around the executor

`target_s` is what the executor does besides drafting. T, C and W are piecewise linear and never
fall (padding and caches make them bend); the features are named in `TARGET`, `DRAFT` and `HOST`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.request.errors import FieldError
from cbatch.engine.price_fit import Features, fit_columns, fit_curves, fit_drafting, matrix
from sim.cost.tables import Curve
from sim.traces.files import read_whole

FORMAT, VERSION = "cbatch-calibration", 4
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CONTEXT_KNOTS = (0, 256, 1024, 4096, 16384, 65536, 262144)
_IDLE_KNOTS_S = (0.0, 0.01, 0.03, 0.1)
# Of what decoding rows read, the share that is not in caches, by steps since a chunk was computed.
_COLD = (1.0, 1.0, 0.5, 0.25, 0.125)
_LEAST_IDLE_S = 1e-4


def cold(work: StepWork) -> float:
    since = work.steps_since_prefill
    return _COLD[since] if since < len(_COLD) else 0.0


TARGET: Features = {
    "row": attrgetter("rows"),
    "chunk": lambda work: work.rows - work.decode_rows,  # a row that prefills
    "logit": attrgetter("logit_tokens"),
    "cold_context_token": lambda work: work.decode_context_tokens * cold(work),
    "padded_context_token": lambda work: work.decode_rows * work.decode_longest_tokens,
    "prefill_context_token": attrgetter("prefill_context_tokens"),
    "prefill_pair": attrgetter("prefill_pairs"),
    "verifying_step": lambda work: work.draft_tokens > 0,
    "verifying_row": lambda work: work.decode_rows * (work.draft_tokens > 0),
    "draft_token": attrgetter("draft_tokens"),  # beyond a token
    # Beyond a context token.
    "verified_context_token": lambda work: work.decode_context_tokens * (work.draft_tokens > 0),
    "admission": attrgetter("admitted"),
}
DRAFT: Features = {
    "drafting_step": lambda work: work.draft_depth > 0,
    "depth": attrgetter("draft_depth"),
    "drafting_row": lambda work: work.decode_rows * (work.draft_depth > 0),
    "draft_token": attrgetter("draft_tokens"),
    "context_token": attrgetter("draft_context_tokens"),
    "context_token_pass": lambda work: work.draft_context_tokens * work.draft_depth,
    "ingesting_step": lambda work: work.ingested_tokens > 0,
    "ingested_token": attrgetter("ingested_tokens"),
}
HOST: Features = {
    "step": lambda work: 1,
    "cold_step": cold,
    "idle_s": lambda work: min(work.idle_s, _IDLE_KNOTS_S[-1]),
    "row": attrgetter("rows"),
    "admission": attrgetter("admitted"),
    "admitting_step": lambda work: work.admitted > 0,
    "drafting_step": lambda work: work.draft_depth > 0,
    "drafting_row": lambda work: work.decode_rows * (work.draft_depth > 0),
    "draft_token": attrgetter("draft_tokens"),
}
# Of steps whose depths `goodput` chooses, besides.
CONTROLLED: Features = {
    "controlled_step": lambda work: 1,
    "controlled_row": attrgetter("rows"),
    "controlled_admission": attrgetter("admitted"),
}


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
            ("host_s", self.host_s, HOST | CONTROLLED),
        ):
            if set(found) != set(names) or not all(0 <= s < np.inf for s in found.values()):
                remedy = f"give seconds of 0 or more for {', '.join(names)}"
                raise FieldError(f"prices.{field}", "are not all there", remedy)


class CalibratedCost:
    """The cost model (see `sim.cost.base`) of such prices, the host's share among them;
    `controlled`: of steps whose depths `goodput` chooses."""

    def __init__(self, prices: Prices, *, controlled: bool = False) -> None:
        self._tokens = Curve(prices.tokens.at, prices.tokens.seconds)
        self._context = Curve(prices.context.at, prices.context.seconds)
        self._idle = prices.idle
        self._target = _paid(TARGET, prices.target_s)
        self._draft = _paid(DRAFT, prices.draft_s)
        self._host = _paid(HOST | CONTROLLED if controlled else HOST, prices.host_s)

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        target_s = self._tokens(work.target_tokens)
        target_s += self._context(work.decode_context_tokens)
        if work.idle_s > _LEAST_IDLE_S:
            target_s += float(np.interp(work.idle_s, self._idle.at, self._idle.seconds))
        target_s += sum([price * of(work) for of, price in self._target])
        host_s = sum([price * of(work) for of, price in self._host])
        if work.draft_depth or work.ingested_tokens:
            return sum([price * of(work) for of, price in self._draft]), target_s, host_s
        return 0.0, target_s, host_s


def _paid(
    features: Features, prices: dict[str, float]
) -> list[tuple[Callable[[StepWork], float], float]]:
    """Those that cost something."""
    return [(of, prices[name]) for name, of in features.items() if prices[name]]


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
        found = msgspec.json.decode(read_whole(Path(path)), type=Calibration)
    except (OSError, msgspec.MsgspecError, FieldError, RecursionError) as error:
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
    tokens = np.array([s.work.target_tokens for s in samples])
    contexts = np.array([s.work.decode_context_tokens for s in samples])
    idles_s = np.array([s.work.idle_s for s in samples])
    curves = [
        (tokens, _up_to(tokens.max(), _KNOTS)),
        (contexts, _up_to(contexts.max(), _CONTEXT_KNOTS)),
        (idles_s, _IDLE_KNOTS_S),
    ]
    seconds, target_s = fit_curves(curves, TARGET, samples)
    tokens_s, context_s, idle_s = (
        Line(tuple(map(float, at)), tuple(s)) for s, (_, at) in zip(seconds, curves, strict=True)
    )
    works = [s.work for s in samples]
    extra = matrix(CONTROLLED, works) * np.array([[s.controlled] for s in samples])
    columns = np.concatenate([matrix(HOST, works), extra], axis=1)
    host = fit_columns(columns, np.array([s.host_s for s in samples]))
    return Prices(
        tokens=tokens_s,
        context=context_s,
        idle=idle_s,
        target_s=target_s,
        draft_s=fit_drafting(DRAFT, samples),
        host_s=dict(zip(HOST | CONTROLLED, host.tolist(), strict=True)),
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
