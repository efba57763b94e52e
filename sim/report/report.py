"""The report of a run: one schema for what was simulated and for what was measured.

Definitions, the same wherever such a report comes from. Times are in seconds.

- `ttft_s`: from a request's arrival (its scheduled send) to its first output token.
- `tpot_s`: (last token - first token) / (output tokens - 1), of requests with two tokens or more.
- `e2e_s`: from arrival to the last token. `queue_s`: from arrival to the first slot.
- `itl_s`: between tokens, pooled over all requests: a gap in which c tokens came at once counts as
  c gaps of a c-th each. `chunk_gap_s` counts it as one gap.
- percentiles are linear between ranks (numpy's default), over requests or over tokens.
- `goodput`: requests that met every objective that they have, over all that were sent.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError

SCHEMA = "cbatch-report"
VERSION = 1


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a measure is distributed; None where nothing was measured."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> Spread:
        """`weights` (int) counts how often each value stands for itself."""
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
    """What `np.percentile(np.repeat(values, weights), percents)` gives, without the copies."""
    order = np.argsort(values)  # whichever of equal values is first
    ordered, ends = values[order], np.cumsum(weights[order])
    ranks = np.asarray(percents) / 100 * (int(ends[-1]) - 1)
    below = np.floor(ranks)
    low = ordered[np.searchsorted(ends, below, side="right")]
    high = ordered[np.searchsorted(ends, np.ceil(ranks), side="right")]
    between: np.ndarray = low + (high - low) * (ranks - below)
    return between


class Objectives(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request should keep to, in seconds; None: no such objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


def parse_objectives(texts: tuple[str, ...]) -> Objectives | None:
    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            given[f"{name}_s"] = seconds = float(value)
        except ValueError:
            seconds = math.nan
        if name not in ("ttft", "tpot", "e2e") or not 0 < seconds < math.inf:
            raise FieldError(
                "--slo", f"{text!r} is not known", "write ttft=0.5, tpot=... or e2e=..."
            )
    return Objectives(**given) if given else None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    objectives: Objectives  # of requests that bring none of their own
    requests: int
    share: float  # of the requests that were sent
    requests_per_s: float


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None  # accepted / drafted
    tokens_per_step: float | None  # that a row adds in a step in which it adds any


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the engine cannot ever run."""

    index: int  # in the trace, from 0
    prompt_tokens: int
    output_tokens: int
    reason: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request that finished, `index` in the trace; `tpot_s` is None with one output token."""

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
    replica: int | None = None  # that served it, from 0; None: there was one alone


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One of several that served a run together; rates are over the whole run."""

    requests: int  # that finished
    prompt_tokens: int
    output_tokens: int
    ttft_s: Spread
    steps: int
    mean_running: float | None
    preemptions: int
    prefix_hit_tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` says what was run, in full; nothing in here depends on when or where."""

    kind: Literal["simulated", "measured"]
    settings: dict[str, Any]
    requests: int  # that finished
    cut_requests: int  # of these, the ones that the context or the pool ended early
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
    mean_running: float | None  # over time
    preemptions: int | None
    prefix_hit_tokens: int | None
    replicas: tuple[Replica, ...] | None = None  # None: there was one alone
    schema: str = SCHEMA
    version: int = VERSION


def to_json(report: Report) -> bytes:
    """One document with a newline at its end. The same report gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def to_line(record: msgspec.Struct) -> bytes:
    """As files of records have it, of requests that failed too: JSON, a line each."""
    return msgspec.json.encode(record) + b"\n"
