"""The report of a replay, summed over the schedulers that served it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.replay.intake import Intake
from sim.replay.metrics import MetricsRecorder
from sim.replay.replica import ReplayedEngine
from sim.report.report import Goodput, Objectives, Replica, Report, SpeculationReport, Spread

MIN_REQUESTS = 20  # finished requests without which overload is not judged
PILED_UP = 0.1  # share of the requests that are open at the last arrival in an overloaded run


def report_of(
    intake: Intake,
    served: Sequence[ReplayedEngine],
    objectives: Objectives | None,
    settings: dict[str, Any],
    *,
    by_replica: bool = False,
) -> Report:
    recorder = MetricsRecorder.total([one.recorder for one in served])
    stats = [one.scheduler.stats for one in served]
    gap_s, chunks, tokens = recorder.gaps()
    duration_s = max(recorder.end_s - (intake.first_s or 0.0), 0.0)

    def rate(count: float) -> float | None:
        return count / duration_s if duration_s > 0 else None

    return Report(
        kind="simulated",
        settings=settings,
        requests=recorder.num_finished,
        cut_requests=recorder.num_cut,
        refused=tuple(intake.refused),
        duration_s=duration_s,
        prompt_tokens=recorder.prompt_tokens,
        output_tokens=recorder.output_tokens,
        requests_per_s=rate(recorder.num_finished),
        prompt_tokens_per_s=rate(recorder.prompt_tokens - recorder.hit_tokens),
        output_tokens_per_s=rate(recorder.output_tokens),
        ttft_s=Spread.of(np.asarray(recorder.ttft_s)),
        tpot_s=Spread.of(np.asarray(recorder.tpot_s)),
        itl_s=Spread.of(gap_s * chunks / np.maximum(tokens, 1), tokens),
        chunk_gap_s=Spread.of(gap_s, chunks),
        e2e_s=Spread.of(np.asarray(recorder.e2e_s)),
        queue_s=Spread.of(np.asarray(recorder.queue_s)),
        goodput=_goodput(recorder, objectives, intake.num_arrived, rate(recorder.num_good)),
        speculation=_speculation(served, recorder),
        ttft_growth=_ttft_growth(recorder),
        steps=sum(s.steps for s in stats),
        mean_running=rate(recorder.running_s),
        preemptions=sum(s.preemptions for s in stats),
        prefix_hit_tokens=sum(s.prefix_hit_tokens for s in stats),
        replicas=tuple(_replica(one, rate(one.recorder.running_s)) for one in served)
        if by_replica
        else None,
    )


def _replica(served: ReplayedEngine, mean_running: float | None) -> Replica:
    recorder, stats = served.recorder, served.scheduler.stats
    return Replica(
        requests=recorder.num_finished,
        prompt_tokens=recorder.prompt_tokens,
        output_tokens=recorder.output_tokens,
        ttft_s=Spread.of(np.asarray(recorder.ttft_s)),
        steps=stats.steps,
        mean_running=mean_running,
        preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens,
    )


def _ttft_growth(recorder: MetricsRecorder) -> float | None:
    """Return the slope of TTFT over arrivals, None if the run is not overloaded. It is if requests
    pile up until the last arrival, by more than chance, and TTFT more than doubles."""
    arrival_s, ttft_s = np.asarray(recorder.arrival_s), np.asarray(recorder.ttft_s)
    count, span_s = len(arrival_s), float(np.ptp(arrival_s)) if len(arrival_s) else 0.0
    open_at_end = np.count_nonzero(
        arrival_s + np.asarray(recorder.e2e_s) > arrival_s.max(initial=0)
    )
    if count < MIN_REQUESTS or open_at_end <= max(PILED_UP * count, 3 * math.sqrt(count)):
        return None
    slope = float(np.polyfit(arrival_s, ttft_s, 1)[0]) if span_s > 0 else 0.0
    return slope if slope * span_s > ttft_s.mean() else None


def _goodput(
    recorder: MetricsRecorder,
    objectives: Objectives | None,
    num_arrived: int,
    requests_per_s: float | None,
) -> Goodput | None:
    if objectives is None or requests_per_s is None:
        return None
    return Goodput(
        objectives=objectives,
        requests=recorder.num_good,
        share=recorder.num_good / num_arrived,
        requests_per_s=requests_per_s,
    )


def _speculation(
    served: Sequence[ReplayedEngine], recorder: MetricsRecorder
) -> SpeculationReport | None:
    if not served[0].scheduler.state.policy.max_depth:
        return None
    stats = [one.scheduler.stats for one in served]
    drafted, accepted = sum(s.drafted_tokens for s in stats), sum(s.accepted_tokens for s in stats)
    emitted = sum(s.emitted_tokens for s in stats)
    return SpeculationReport(
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        acceptance=accepted / drafted if drafted else None,
        tokens_per_step=emitted / recorder.row_steps if recorder.row_steps else None,
    )
