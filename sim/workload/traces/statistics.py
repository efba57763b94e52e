"""Statistics of a trace in one pass; memory grows by 8 bytes a request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from sim.report.report import Spread
from sim.workload.traces.request import TraceRequest

MINUTE_S = 60.0


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics; None if the trace lacks the data, or has too few requests."""

    requests: int
    span_s: float  # first to last arrival
    rate_per_s: float | None
    gap_cv: float | None  # coefficient of variation of the gaps between arrivals
    same_stamp_share: float  # of requests that arrive together with the previous one
    peak_minute_ratio: float | None  # requests of the busiest minute relative to the mean minute
    empty_minutes: int
    prompt_tokens: Spread
    output_tokens: Spread
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
    gaps_s: np.ndarray  # float64, between arrivals


def summarise(requests: Iterable[TraceRequest]) -> TraceSummary:
    """Summarise at least one request, in order of arrival."""
    prompts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    minutes: Counter[int] = Counter()
    sessions: set[str] = set()
    sharing, times_s = _Sharing(), array("d")
    for request in requests:
        times_s.append(request.arrival_s)
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
        minutes[int(request.arrival_s // MINUTE_S)] += 1
        if request.session is not None:
            sessions.add(request.session)
        sharing.add(request)
    count, last_s = len(times_s), times_s[-1]
    gaps_s = np.diff(np.asarray(times_s))
    mean_s = float(gaps_s.mean()) if count > 2 else 0.0
    num_minutes = int(last_s // MINUTE_S) + 1
    statistics = TraceStatistics(
        requests=count,
        span_s=last_s,
        rate_per_s=(count - 1) / last_s if last_s > 0 else None,
        gap_cv=float(gaps_s.std()) / mean_s if mean_s > 0 else None,
        same_stamp_share=int(np.count_nonzero(gaps_s == 0)) / count,
        peak_minute_ratio=max(minutes.values()) * num_minutes / count if num_minutes > 1 else None,
        empty_minutes=num_minutes - len(minutes),
        prompt_tokens=_spread(prompts),
        output_tokens=_spread(outputs),
        sessions=len(sessions) or None,
        shared_prefix_share=sharing.share,
    )
    return TraceSummary(statistics, minutes, prompts, outputs, gaps_s)


def _spread(counts: Counter[int]) -> Spread:
    values, weights = (np.fromiter(each, np.int64) for each in (counts, counts.values()))
    return Spread.of(values, weights)


class _Sharing:
    """A trie of prefix blocks as one dictionary: (parent node, hash id) -> node."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._shared_tokens = self._tokens = 0

    def add(self, request: TraceRequest) -> None:
        self._tokens += request.prompt_tokens
        node, known = 0, len(self._nodes)
        for name in request.hash_ids or ():
            node = self._nodes.setdefault((node, name), len(self._nodes) + 1)
        num_shared = len(request.hash_ids or ()) - (len(self._nodes) - known)
        tokens = num_shared * (request.hash_block_tokens or 0)
        self._shared_tokens += min(tokens, request.prompt_tokens)

    @property
    def share(self) -> float | None:
        return self._shared_tokens / self._tokens if self._nodes else None
