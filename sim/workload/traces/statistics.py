"""Statistics of a trace in one pass; memory grows only with the number of distinct values."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from sim.report.report import weighted_percentiles
from sim.workload.traces.request import TraceRequest

MINUTE_S = 60.0
PERCENTS = (50.0, 90.0, 99.0)


class LengthStatistics(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, counts: Counter[int]) -> LengthStatistics:
        values = np.fromiter(counts, dtype=np.int64)
        weights = np.fromiter(counts.values(), dtype=np.int64)
        p50, p90, p99 = weighted_percentiles(values, weights, PERCENTS).tolist()
        mean = float(np.dot(values, weights)) / int(weights.sum())
        return cls(mean, p50, p90, p99, int(values.max()))


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics; None if the trace lacks the data, or has too few requests."""

    requests: int
    span_s: float  # first to last arrival
    rate_per_s: float | None
    gap_cv: float | None  # coefficient of variation of the gaps between arrivals
    same_stamp_share: float  # of requests that arrive together with the previous one
    peak_minute_ratio: float | None  # requests of the busiest minute relative to the mean minute
    empty_minutes: int
    prompt_tokens: LengthStatistics
    output_tokens: LengthStatistics
    sessions: int | None
    # Share of prompt tokens in blocks that an earlier prompt has after the same prefix: the hits of
    # an unlimited prefix cache.
    shared_prefix_share: float | None


class TraceSummary(msgspec.Struct, frozen=True):
    """The statistics, and the data of the plot."""

    statistics: TraceStatistics
    per_minute: Counter[int]
    prompt_counts: Counter[int]
    output_counts: Counter[int]
    gaps_s: np.ndarray  # float64, of the first `MAX_GAPS` arrivals


MAX_GAPS = 1_000_000  # gaps kept for the plot


def summarise(requests: Iterable[TraceRequest]) -> TraceSummary:
    """Summarise at least one request, in order of arrival."""
    prompts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    minutes: Counter[int] = Counter()
    sessions: set[str] = set()
    sharing = _Sharing()
    gaps = _Gaps()
    count, last_s = 0, 0.0
    for request in requests:
        if count:
            gaps.add(request.arrival_s - last_s)
        last_s = request.arrival_s
        count += 1
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
        minutes[int(last_s // MINUTE_S)] += 1
        if request.session is not None:
            sessions.add(request.session)
        sharing.add(request)
    num_minutes = int(last_s // MINUTE_S) + 1
    statistics = TraceStatistics(
        requests=count,
        span_s=last_s,
        rate_per_s=(count - 1) / last_s if last_s > 0 else None,
        gap_cv=gaps.cv,
        same_stamp_share=gaps.zeros / count,
        peak_minute_ratio=max(minutes.values()) * num_minutes / count if num_minutes > 1 else None,
        empty_minutes=num_minutes - len(minutes),
        prompt_tokens=LengthStatistics.of(prompts),
        output_tokens=LengthStatistics.of(outputs),
        sessions=len(sessions) or None,
        shared_prefix_share=sharing.share,
    )
    return TraceSummary(statistics, minutes, prompts, outputs, np.asarray(gaps.first))


class _Gaps:
    """Running mean and variance of gaps (Welford 1962)."""

    def __init__(self) -> None:
        self.first = array("d")
        self.zeros = self._count = 0
        self._mean = self._squares = 0.0

    def add(self, gap_s: float) -> None:
        self._count += 1
        self.zeros += gap_s == 0
        deviation_s = gap_s - self._mean
        self._mean += deviation_s / self._count
        self._squares += deviation_s * (gap_s - self._mean)
        if self._count <= MAX_GAPS:
            self.first.append(gap_s)

    @property
    def cv(self) -> float | None:
        if self._count < 2 or self._mean <= 0:
            return None
        return math.sqrt(self._squares / self._count) / self._mean


class _Sharing:
    """A trie of prefix blocks as one dictionary: (parent node, hash id) -> node."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._shared_tokens = self._tokens = 0
        self._has_names = False

    def add(self, request: TraceRequest) -> None:
        self._tokens += request.prompt_tokens
        if request.hash_ids is None:
            return
        self._has_names = True
        node, num_shared = 0, 0
        for name in request.hash_ids:
            key = (node, name)
            known = self._nodes.get(key)
            if known is None:
                known = self._nodes[key] = len(self._nodes) + 1
            else:
                num_shared += 1
            node = known
        tokens = num_shared * (request.hash_block_tokens or 0)
        self._shared_tokens += min(tokens, request.prompt_tokens)

    @property
    def share(self) -> float | None:
        return self._shared_tokens / self._tokens if self._has_names else None
