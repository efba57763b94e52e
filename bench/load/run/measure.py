"""Computes a report from calls. Definitions are in `sim.report.report` and
`bench.load.run.report`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from bench.load.client.http import CallError, TimedCall, TokenSource
from bench.load.run.drive import Part
from bench.load.run.report import (
    COUNTERS,
    ClientUse,
    Estimate,
    FailedRecord,
    Measured,
    MeasuredRecord,
    ServerCounters,
    ServerSample,
    Steady,
)
from bench.report import student95
from cbatch.system.machine import describe_machine, describe_versions
from sim.report.report import Goodput, Objectives, Refused, Spread

BUSY_SHARE = 0.8  # share of a core; the report warns of a client that uses more.
LATE_S = 0.01  # delay beyond which a send is late.
MIN_IN_TIME = 0.98  # share of sends in time; the report warns of an open loop with less.
REFUSALS = (400, 413, 422)  # statuses of calls that the report lists as `refused`
# Measures with a confidence interval.
ESTIMATED = ("requests_per_s", "output_tokens_per_s")
ESTIMATED_SPREADS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
MIN_CALLS = 20  # minimum of calls in a steady window; with fewer there is no window.
SATURATED_SHARE = 0.1  # an open loop is saturated if more of its calls outlast the window
START_SHARE = 0.1  # share of an open loop's span that is left out: the server starts empty


class LoadRun(msgspec.Struct):
    """One repeat: the parts of all client processes, and the server's metrics."""

    parts: list[Part]
    server: ServerCounters | None = None
    server_samples: tuple[ServerSample, ...] = ()
    interrupted: bool = False
    open_loop: bool = False
    ramp_s: float = 0.0

    @property
    def calls(self) -> list[TimedCall]:
        return [call for part in self.parts for call in part.calls]


def measure(
    runs: Sequence[LoadRun], *, settings: dict[str, Any], objectives: Objectives | None = None
) -> Measured:
    """Return the report of a run, or of repeats: their calls are pooled and their durations
    added."""
    report = _measure(runs, settings, objectives)
    if len(runs) < 2:
        return report
    reports = [_measure([run], settings, objectives) for run in runs]
    values = {name: [getattr(each, name) for each in reports] for name in ESTIMATED}
    for name, cut in itertools.product(ESTIMATED_SPREADS, ("mean", "p50", "p99")):
        values[f"{name}.{cut}"] = [getattr(getattr(each, name), cut) for each in reports]
    confidence = {name: _estimate(each) for name, each in values.items() if None not in each}
    return msgspec.structs.replace(report, confidence=confidence)


def records(runs: Sequence[LoadRun]) -> Iterable[MeasuredRecord | FailedRecord]:
    """Yield a record per call, run by run, in order of scheduled sends."""
    for number, run in enumerate(runs):
        for call in sorted(run.calls, key=lambda call: (call.scheduled_s, call.index)):
            common: dict[str, Any] = {"index": call.index, "run": number, "sent_s": call.sent_s}
            common |= {"arrival_s": call.scheduled_s, "session": call.session}
            common["prompt_tokens"] = call.prompt_tokens
            if call.error is not None:
                error, detail = call.error.label, call.error.detail
                yield FailedRecord(end_s=call.end_s, error=error, detail=detail, **common)
                continue
            yield MeasuredRecord(
                output_tokens=call.output_tokens,
                queue_s=0.0,
                ttft_s=call.ttft_s,
                tpot_s=call.tpot_s,
                e2e_s=call.e2e_s,
                prefix_hit_tokens=call.cached_tokens,
                preemptions=0,
                ttft_from_send_s=call.first_s - call.sent_s,
                chunks=call.chunks,
                **common,
            )


# -- inside


def _measure(
    runs: Sequence[LoadRun], settings: dict[str, Any], objectives: Objectives | None
) -> Measured:
    calls = [call for run in runs for call in run.calls]
    good = [call for call in calls if call.error is None]
    duration_s = sum(_duration_s(run) for run in runs)
    prompt_tokens = sum(call.prompt_tokens for call in good)
    output_tokens = sum(call.output_tokens for call in good)
    cached_tokens = sum(call.cached_tokens for call in good)
    server = _sum_counters([run.server for run in runs])
    if not cached_tokens and server is not None:
        cached_tokens = min(server.prefix_hit_tokens or 0, prompt_tokens)
    fields = ("steps", "preemptions", "prefix_hit_tokens")
    counted: dict[str, Any] = {name: getattr(server, name, None) for name in fields}
    load = _load(runs, duration_s)
    client = _client(runs, calls)
    failed = [(call, call.error) for call in calls if call.error is not None]
    sources: tuple[TokenSource, ...] = ("chunks", "usage", "per chunk usage")  # least exact first
    used = {call.counted_by for call in good}

    def rate(count: float) -> float | None:
        return count / duration_s if duration_s > 0 else None

    return Measured(
        kind="measured",
        settings=settings,
        requests=len(good),
        cut_requests=sum(call.ignore_eos and call.output_tokens < call.max_tokens for call in good),
        refused=tuple(_refused(call, error) for call, error in failed if error.status in REFUSALS),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=rate(len(good)),
        prompt_tokens_per_s=rate(prompt_tokens - cached_tokens),
        output_tokens_per_s=rate(output_tokens),
        speculation=None,
        mean_running=None,
        **counted,
        sent=len(calls) + load["unfinished"],
        errors=dict(sorted(Counter(error.label for _, error in failed).items())),
        error_examples={error.label: error.detail for _, error in reversed(failed)},
        interrupted=any(run.interrupted for run in runs),
        token_source=next((source for source in sources if source in used), "none"),
        client=client,
        server=server,
        server_over_time=runs[0].server_samples if len(runs) == 1 else (),
        repeats=len(runs),
        confidence={},
        warnings=tuple(_warnings(runs, client, calls, server, load["saturated"])),
        machine=describe_machine(),
        versions=describe_versions(),
        **load,
        **_times(good),
        **_goodput(calls, objectives, duration_s),
    )


def _refused(call: TimedCall, error: CallError) -> Refused:
    return Refused(
        index=call.index,
        prompt_tokens=call.prompt_tokens,
        output_tokens=call.max_tokens,
        reason=error.detail,
    )


def _load(runs: Sequence[LoadRun], duration_s: float) -> dict[str, Any]:
    windows = [_steady(run) for run in runs]
    saturated = [
        _is_saturated(run.calls, window)
        for run, window in zip(runs, windows, strict=True)
        if run.open_loop and window is not None
    ]
    peak, busy_s = 0, 0.0
    for run in runs:
        end_s, sent_s = np.array([(c.end_s, c.sent_s) for c in run.calls]).reshape(-1, 2).T
        busy_s += float((end_s - sent_s).sum())
        # A call that ends at the time when another is sent does not overlap it.
        order = np.argsort(np.concatenate([end_s, sent_s]), kind="stable")
        in_flight = np.cumsum(np.repeat([-1, 1], len(end_s))[order])
        peak = max(peak, int(in_flight.max(initial=0)))
    return {
        "unfinished": sum(part.unfinished for run in runs for part in run.parts),
        "mean_in_flight": busy_s / duration_s if duration_s > 0 else None,
        "peak_in_flight": peak,
        "steady": windows[0] if len(runs) == 1 else None,
        "saturated": any(saturated) if saturated else None,
    }


def _steady(run: LoadRun) -> Steady | None:
    """Return the figures of the window from the end of the ramp to the last scheduled send, after
    which the load decreases. None if the window has fewer than `MIN_CALLS` calls or no
    success."""
    calls = run.calls
    if not calls:
        return None
    first_s = min(call.scheduled_s for call in calls)
    start_s, end_s = first_s + run.ramp_s, max(call.scheduled_s for call in calls)
    if run.open_loop:
        start_s = max(start_s, first_s + START_SHARE * (end_s - first_s))
    else:
        # Clients that start together also end together; from the second call on they are spread.
        start_s = max([start_s, *(c.end_s for c in calls if c.scheduled_s <= start_s)])
    inside = [call for call in calls if start_s <= call.scheduled_s < end_s]
    succeeded = [call for call in calls if call.error is None]
    good = [call for call in inside if call.error is None]
    if len(inside) < MIN_CALLS or not good:
        return None
    stamps_s, tokens = read_times(succeeded)
    ended = sum(start_s <= call.end_s < end_s for call in succeeded)
    came = float(tokens[(start_s <= stamps_s) & (stamps_s < end_s)].sum())
    return Steady(
        start_s=start_s,
        end_s=end_s,
        requests_per_s=ended / (end_s - start_s),
        output_tokens_per_s=came / (end_s - start_s),
        **_latencies(good),
    )


def read_times(calls: Sequence[TimedCall]) -> tuple[np.ndarray, np.ndarray]:
    """Return the times at which tokens arrived in seconds, and their numbers, both float64. The
    tokens of a response that was not streamed arrive at its end."""
    stamps_s = [s for call in calls for s in (call.chunk_s or [call.end_s])]
    tokens = [n for c in calls for n in (c.tokens_by_read() if c.chunk_s else [c.output_tokens])]
    return np.asarray(stamps_s, np.float64), np.asarray(tokens, np.float64)


def _is_saturated(calls: Sequence[TimedCall], steady: Steady) -> bool:
    """Return whether calls of an open loop piled up in the window: fewer ended than were scheduled,
    by more than `SATURATED_SHARE` and by more than 3 standard deviations of a Poisson count."""
    sent = sum(steady.start_s <= call.scheduled_s < steady.end_s for call in calls)
    ended = sum(steady.start_s <= call.end_s < steady.end_s for call in calls)
    return sent - ended > max(SATURATED_SHARE * sent, 3 * math.sqrt(sent))


def _times(good: Sequence[TimedCall]) -> dict[str, Any]:
    # Gaps between successive reads of a call, and the tokens of the later read.
    several = [call for call in good if len(call.chunk_s) > 1]
    gap_s = np.concatenate([np.zeros(0), *(np.diff(np.asarray(c.chunk_s)) for c in several)])
    gap_tokens = np.array([n for c in several for n in c.tokens_by_read()[1:]], np.int64)
    chunks = sum(call.chunks for call in good)
    tokens = sum(call.output_tokens for call in good if call.chunks)
    return {
        **_latencies(good),
        "itl_s": Spread.of(gap_s / np.maximum(gap_tokens, 1), gap_tokens),
        "chunk_gap_s": Spread.of(gap_s),
        "queue_s": _spread(()),
        "ttft_from_send_s": _spread(call.first_s - call.sent_s for call in good),
        "e2e_from_send_s": _spread(call.end_s - call.sent_s for call in good),
        "normalised_s": _spread(call.e2e_s / call.output_tokens for call in good),
        "chunks": chunks,
        "tokens_per_chunk": tokens / chunks if chunks else None,
    }


def _latencies(good: Sequence[TimedCall]) -> dict[str, Any]:
    return {
        "ttft_s": _spread(call.ttft_s for call in good),
        "tpot_s": _spread(t for call in good if (t := call.tpot_s) is not None),
        "e2e_s": _spread(call.e2e_s for call in good),
    }


def _spread(values: Iterable[float]) -> Spread:
    return Spread.of(np.fromiter(values, dtype=np.float64))


def _duration_s(run: LoadRun) -> float:
    ends = [call.end_s for call in run.calls if call.error is None]
    return max(ends) - min(call.scheduled_s for call in run.calls) if ends else 0.0


def _sum_counters(counters: Sequence[ServerCounters | None]) -> ServerCounters | None:
    """Return the sum of the counters of several runs, or None if a run has none."""
    known = [each for each in counters if each is not None]
    if not known or len(known) < len(counters):
        return None
    values = {name: [getattr(each, name) for each in known] for name in COUNTERS.values()}
    totals = {name: None if None in each else sum(each) for name, each in values.items()}
    positions = itertools.zip_longest(*(each.accepted_by_position for each in known), fillvalue=0)
    return ServerCounters.of(totals, map(sum, positions))


def _goodput(
    calls: Sequence[TimedCall], objectives: Objectives | None, duration_s: float
) -> dict[str, Any]:
    """Return the fields of `Measured` about objectives. A call's limits override `objectives`."""
    defaults = objectives or Objectives()
    met: dict[str, int] = {}  # by objective that limits a call
    good: list[TimedCall] = []
    for call in calls:
        missed = call.error is not None
        for name, own_s in zip(("ttft", "tpot", "e2e"), call.slo_s, strict=True):
            limit_s = getattr(defaults, f"{name}_s") if own_s is None else own_s
            if limit_s is not None:
                value_s = getattr(call, f"{name}_s")
                is_met = call.error is None and (value_s is None or value_s <= limit_s)
                met[name] = met.get(name, 0) + is_met
                missed |= not is_met
        if not missed:
            good.append(call)
    if not calls or not duration_s or (objectives is None and not met):
        return {"goodput": None, "attainment": {}, "good_output_tokens_per_s": None}
    count, share, rate = len(good), len(good) / len(calls), len(good) / duration_s
    return {
        "goodput": Goodput(objectives=defaults, requests=count, share=share, requests_per_s=rate),
        "attainment": {name: count / len(calls) for name, count in met.items()},
        "good_output_tokens_per_s": sum(call.output_tokens for call in good) / duration_s,
    }


def _client(runs: Sequence[LoadRun], calls: Sequence[TimedCall]) -> ClientUse:
    parts = [part for run in runs for part in run.parts]
    elapsed_s = sum(max(part.elapsed_s for part in run.parts) for run in runs)
    chunks = sum(call.chunks for call in calls)
    return ClientUse(
        processes=max(len(run.parts) for run in runs),
        cpu_share=max(part.cpu_s / part.elapsed_s for part in parts),
        send_lag_s=_spread(call.sent_s - call.scheduled_s for call in calls),
        chunks_per_s=chunks / elapsed_s if chunks else None,
    )


def _warnings(
    runs: Sequence[LoadRun],
    client: ClientUse,
    calls: Sequence[TimedCall],
    server: ServerCounters | None,
    saturated: bool | None,
) -> Iterable[str]:
    late_ms, counted = 1e3 * (client.send_lag_s.p99 or 0.0), getattr(server, "output_tokens", None)
    in_time = sum(call.sent_s - call.scheduled_s <= LATE_S for call in calls) / max(len(calls), 1)
    seen = sum(call.output_tokens for call in calls)
    whole = all(call.error is None for call in calls) and not any(run.interrupted for run in runs)
    guessed = any(call.counted_by == "chunks" and call.error is None for call in calls)
    for applies, words in (
        (
            client.cpu_share > BUSY_SHARE,
            f"the client used {client.cpu_share:.0%} of a core: the client, not the server, may be "
            "the limit; use more --processes",
        ),
        (
            late_ms > 1e3 * LATE_S,
            f"1 % of the calls were sent more than {late_ms:.0f} ms late: the client lags",
        ),
        (
            calls and runs[0].open_loop and in_time < MIN_IN_TIME,
            f"only {in_time:.1%} of the calls were sent in time: the load was too low",
        ),
        (
            saturated,
            "calls queue up: the server cannot keep up, and latencies grow with the run",
        ),
        (guessed, "the server counts no tokens: each chunk with output counts as one"),
        (
            any(part.gave_up for run in runs for part in run.parts),
            "every call failed: sending was stopped",
        ),
        (
            calls and whole and counted not in (None, seen),
            f"the server counted {counted or 0:,} output tokens, its answers {seen:,}",
        ),
    ):
        if applies:
            yield words


def _estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its 95 % interval, by Student's t with n - 1 degrees of freedom."""
    count, mean = len(values), float(np.mean(values))
    half = student95(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)
