"""The report of a run: one schema for simulated and for measured runs.

Definitions for both kinds of run. Times are in seconds.

- `ttft_s`: from a request's arrival (its scheduled send) to its first output token.
- `tpot_s`: (last token - first token) / (output tokens - 1), for requests with two tokens or more.
- `e2e_s`: from arrival to the last token. `queue_s`: from arrival to the first slot.
- `itl_s`: between tokens, pooled over all requests. A gap after which c tokens arrive together
  counts as c gaps of 1/c of its length. `chunk_gap_s` counts it as one gap.
- percentiles are linear between ranks (numpy's default), over requests or over tokens.
- `prompt_tokens_per_s`: prompt tokens that were computed, without those of the prefix cache, of
  finished requests.
- `goodput`: requests that met all their objectives, relative to all that were sent.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.request.numbers import MAX_FLOAT

SCHEMA = "cbatch-report"
VERSION = 1


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a measure; None if nothing was measured."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> Spread:
        """Return the spread of `values`; `weights` (int) says how often each value counts."""
        count = len(values) if weights is None else int(np.add.reduce(weights))
        if not count:
            return cls(count=0, mean=None, p50=None, p90=None, p99=None, max=None)
        if weights is None:
            cuts = np.percentile(values, (50, 90, 99))
            mean = math.fsum(values.tolist()) / count
        else:
            cuts = weighted_percentiles(values, weights, (50, 90, 99))
            mean = float(np.dot(values, weights)) / count
        p50, p90, p99 = (float(cut) for cut in cuts)
        return cls(count=count, mean=mean, p50=p50, p90=p90, p99=p99, max=float(values.max()))


def weighted_percentiles(
    values: np.ndarray, weights: np.ndarray, percents: tuple[float, ...]
) -> np.ndarray:
    """Return `np.percentile(np.repeat(values, weights), percents)` without making the copies."""
    order = np.argsort(values)  # the order of equal values does not matter
    ordered, ends = values[order], np.cumsum(weights[order])
    ranks = np.asarray(percents) / 100 * (int(ends[-1]) - 1)
    below = np.floor(ranks)
    low = ordered[np.searchsorted(ends, below, side="right")]
    high = ordered[np.searchsorted(ends, np.ceil(ranks), side="right")]
    between: np.ndarray = low + (high - low) * (ranks - below)
    return between


class Objectives(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Upper limits for a request's times, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


def parse_objectives(texts: tuple[str, ...]) -> Objectives | None:
    limits_s: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            limits_s[f"{name}_s"] = seconds = float(value)
        except ValueError:
            seconds = math.nan
        if name not in ("ttft", "tpot", "e2e") or not 0 < seconds <= MAX_FLOAT:
            raise FieldError(
                "--slo", f"{text!r} is not known", "write ttft=0.5, tpot=... or e2e=..."
            )
    return Objectives(**limits_s) if limits_s else None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    objectives: Objectives  # for requests without objectives of their own
    requests: int
    share: float  # of the requests that were sent
    requests_per_s: float


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None  # accepted / drafted
    tokens_per_step: float | None  # mean per row, over steps in which the row emits tokens


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the engine can never run."""

    index: int  # in the trace, from 0
    prompt_tokens: int
    output_tokens: int
    reason: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request with number `index` in the trace; `tpot_s` is None for one output
    token."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    queue_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    prefix_hit_tokens: int
    preemptions: int
    session: str | None = None
    replica: int | None = None  # replica that served it, from 0; None if there was only one


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One of several replicas of a run; rates are over the whole run."""

    requests: int  # finished
    prompt_tokens: int
    output_tokens: int
    ttft_s: Spread
    steps: int
    mean_running: float | None
    preemptions: int
    prefix_hit_tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A report. `settings` describes the run in full; no field depends on the date or the
    machine."""

    kind: Literal["simulated", "measured"]
    settings: dict[str, Any]
    requests: int  # finished
    cut_requests: int  # finished, but ended early by the context length or the pool
    refused: tuple[Refused, ...]
    duration_s: float  # first arrival to last token
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    chunk_gap_s: Spread
    e2e_s: Spread
    queue_s: Spread
    goodput: Goodput | None
    speculation: SpeculationReport | None
    steps: int | None
    mean_running: float | None  # mean number of requests with a slot, over `duration_s`
    preemptions: int | None
    prefix_hit_tokens: int | None
    replicas: tuple[Replica, ...] | None = None  # None: there was only one
    # Seconds by which TTFT grows per second of arrivals, in an overloaded simulation.
    ttft_growth: float | None = None
    tokens_per_dollar: float | None = None  # output tokens, if the price of a device is given
    remarks: tuple[str, ...] = ()  # of the trace: which part of it was used
    schema: str = SCHEMA
    version: int = VERSION


def to_json(document: Any) -> bytes:
    """Return a report, or other data, as JSON that ends with a newline. Equal documents give equal
    bytes."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def to_line(record: msgspec.Struct) -> bytes:
    """Return a record as a line of a records file. The load tester also writes failed requests."""
    return msgspec.json.encode(record) + b"\n"
