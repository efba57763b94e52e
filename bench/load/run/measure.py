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

from bench.load.client.call import TimedCall, TokenSource
from bench.load.run.drive import Part
from bench.load.run.report import (
    ClientUse,
    Estimate,
    FailedRecord,
    Measured,
    MeasuredRecord,
    ServerCounters,
    ServerSample,
)
from bench.load.run.scrape import COUNTER_NAMES
from bench.load.run.steady import in_flight, is_saturated, steady_of
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
    return msgspec.structs.replace(report, confidence=confidence(reports))


def confidence(reports: Sequence[Measured]) -> dict[str, Estimate]:
    """Return the mean and confidence interval, by name, of each measure that all repeats have."""
    values: dict[str, list[float | None]] = {
        name: [getattr(report, name) for report in reports] for name in ESTIMATED
    }
    for name in ESTIMATED_SPREADS:
        for cut in ("mean", "p50", "p99"):
            values[f"{name}.{cut}"] = [getattr(getattr(r, name), cut) for r in reports]
    return {
        name: _estimate([v for v in repeats if v is not None])
        for name, repeats in values.items()
        if None not in repeats
    }


def records(runs: Sequence[LoadRun]) -> Iterable[MeasuredRecord | FailedRecord]:
    """Yield a record per call, run by run, in order of scheduled sends."""
    for number, run in enumerate(runs):
        for call in sorted(run.calls, key=lambda call: (call.scheduled_s, call.index)):
            yield _record(number, call)


def sum_counters(counters: Sequence[ServerCounters | None]) -> ServerCounters | None:
    """Return the sum of the counters of several runs, or None if a run has none."""
    known = [each for each in counters if each is not None]
    if not known or len(known) < len(counters):
        return None

    def total(name: str) -> int | None:
        values = [getattr(each, name) for each in known]
        return None if None in values else sum(values)

    positions = itertools.zip_longest(*(each.accepted_by_position for each in known), fillvalue=0)
    return ServerCounters.of({name: total(name) for name in COUNTER_NAMES}, map(sum, positions))


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
    goodput, attainment, good_tokens = _goodput(calls, objectives, duration_s)
    client, server = _client(runs), sum_counters([run.server for run in runs])
    if not cached_tokens and server is not None:
        cached_tokens = min(server.prefix_hit_tokens or 0, prompt_tokens)
    load = _load(runs, duration_s)

    def rate(count: float) -> float | None:
        return count / duration_s if duration_s > 0 else None

    return Measured(
        kind="measured",
        settings=settings,
        requests=len(good),
        cut_requests=sum(call.ignore_eos and call.output_tokens < call.max_tokens for call in good),
        refused=tuple(_refusals(calls)),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=rate(len(good)),
        prompt_tokens_per_s=rate(prompt_tokens - cached_tokens),
        output_tokens_per_s=rate(output_tokens),
        goodput=goodput,
        speculation=None,
        steps=None if server is None else server.steps,
        mean_running=None,
        preemptions=None if server is None else server.preemptions,
        prefix_hit_tokens=None if server is None else server.prefix_hit_tokens,
        sent=len(calls) + load["unfinished"],
        errors=dict(sorted(Counter(c.error.label for c in calls if c.error is not None).items())),
        error_examples={c.error.label: c.error.detail for c in reversed(calls) if c.error},
        interrupted=any(run.interrupted for run in runs),
        token_source=_token_source(good),
        attainment=attainment,
        good_output_tokens_per_s=good_tokens,
        client=client,
        server=server,
        server_over_time=runs[0].server_samples if len(runs) == 1 else (),
        repeats=len(runs),
        confidence={},
        warnings=tuple(_warnings(runs, client, calls, good, server, load["saturated"])),
        machine=describe_machine(),
        versions=describe_versions(),
        **load,
        **_times(good),
    )


def _load(runs: Sequence[LoadRun], duration_s: float) -> dict[str, Any]:
    """Return the fields of `Measured` about calls in flight and saturation."""
    windows = [steady_of(run.calls, run.open_loop, run.ramp_s) for run in runs]
    saturated = [
        is_saturated(run.calls, window)
        for run, window in zip(runs, windows, strict=True)
        if run.open_loop and window is not None
    ]
    mean, peak = in_flight([run.calls for run in runs], duration_s)
    return {
        "unfinished": sum(part.unfinished for run in runs for part in run.parts),
        "mean_in_flight": mean,
        "peak_in_flight": peak,
        "steady": windows[0] if len(runs) == 1 else None,
        "saturated": any(saturated) if saturated else None,
    }


def _times(good: Sequence[TimedCall]) -> dict[str, Any]:
    """Return the fields of `Measured` about latencies and chunks."""
    gap_s, gap_tokens = _gaps(good)
    chunks = sum(call.chunks for call in good)
    tokens = sum(call.output_tokens for call in good if call.chunks)
    return {
        "ttft_s": _spread(call.ttft_s for call in good),
        "tpot_s": _spread(t for call in good if (t := call.tpot_s) is not None),
        "itl_s": Spread.of(gap_s / np.maximum(gap_tokens, 1), gap_tokens),
        "chunk_gap_s": Spread.of(gap_s),
        "e2e_s": _spread(call.e2e_s for call in good),
        "queue_s": _spread(()),
        "ttft_from_send_s": _spread(call.first_s - call.sent_s for call in good),
        "e2e_from_send_s": _spread(call.end_s - call.sent_s for call in good),
        "normalised_s": _spread(call.e2e_s / call.output_tokens for call in good),
        "chunks": chunks,
        "tokens_per_chunk": tokens / chunks if chunks else None,
    }


def _spread(values: Iterable[float]) -> Spread:
    return Spread.of(np.fromiter(values, dtype=np.float64))


def _duration_s(run: LoadRun) -> float:
    """Return the time from the first scheduled send to the last token, 0 if all calls failed."""
    calls = run.calls
    ends = [call.end_s for call in calls if call.error is None]
    return max(ends) - min(call.scheduled_s for call in calls) if ends else 0.0


def _gaps(good: Sequence[TimedCall]) -> tuple[np.ndarray, np.ndarray]:
    """Return the gaps between successive reads of a call in seconds (float64), and the tokens of
    the later read (int64), for all calls together."""
    gaps_s = [np.diff(np.asarray(call.chunk_s)) for call in good if len(call.chunk_s) > 1]
    tokens = [call.tokens_by_read()[1:] for call in good if len(call.chunk_s) > 1]
    if not gaps_s:
        return np.zeros(0), np.zeros(0, np.int64)
    return np.concatenate(gaps_s), np.concatenate(tokens).astype(np.int64)


def _goodput(
    calls: Sequence[TimedCall], objectives: Objectives | None, duration_s: float
) -> tuple[Goodput | None, dict[str, float], float | None]:
    """Return the goodput, the share of calls that met each objective, and the output tokens a
    second of calls that met all. A call's own limits override `objectives`."""
    defaults = objectives or Objectives()
    limits = (defaults.ttft_s, defaults.tpot_s, defaults.e2e_s)
    has_own_limits = any(limit is not None for call in calls for limit in call.slo_s)
    if not calls or not duration_s or (objectives is None and not has_own_limits):
        return None, {}, None
    names = ("ttft", "tpot", "e2e")
    met = dict.fromkeys(names, 0)
    num_good = good_tokens = 0
    for call in calls:
        if call.error is not None:
            continue
        values = (call.ttft_s, call.tpot_s, call.e2e_s)
        fulfilled = [
            value is None or limit is None or value <= limit
            for value, limit in zip(values, _limits(call, limits), strict=True)
        ]
        for name, is_met in zip(names, fulfilled, strict=True):
            met[name] += is_met
        if all(fulfilled):
            num_good += 1
            good_tokens += call.output_tokens
    goodput = Goodput(
        objectives=defaults,
        requests=num_good,
        share=num_good / len(calls),
        requests_per_s=num_good / duration_s,
    )
    limited = {
        name
        for call in calls
        for name, limit in zip(names, _limits(call, limits), strict=True)
        if limit is not None
    }
    shares = {name: met[name] / len(calls) for name in names if name in limited}
    return goodput, shares, good_tokens / duration_s


def _limits(call: TimedCall, defaults: tuple[float | None, ...]) -> list[float | None]:
    pairs = zip(call.slo_s, defaults, strict=True)
    return [default if limit is None else limit for limit, default in pairs]


def _refusals(calls: Sequence[TimedCall]) -> Iterable[Refused]:
    for call in calls:
        if call.error is not None and call.error.status in REFUSALS:
            yield Refused(
                index=call.index,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.max_tokens,
                reason=call.error.detail,
            )


def _token_source(good: Sequence[TimedCall]) -> TokenSource:
    """Return the least exact source of token counts among the calls."""
    sources: tuple[TokenSource, ...] = ("chunks", "usage", "per chunk usage")
    return next((s for s in sources if any(call.counted_by == s for call in good)), "none")


def _client(runs: Sequence[LoadRun]) -> ClientUse:
    parts = [part for run in runs for part in run.parts]
    elapsed_s = sum(max(part.elapsed_s for part in run.parts) for run in runs)
    chunks = sum(call.chunks for run in runs for call in run.calls)
    return ClientUse(
        processes=max(len(run.parts) for run in runs),
        cpu_share=max(part.cpu_s / part.elapsed_s for part in parts),
        send_lag_s=_spread(call.sent_s - call.scheduled_s for run in runs for call in run.calls),
        loop_lag_s=_spread(lag_s for part in parts for lag_s in part.lag_s),
        chunks_per_s=chunks / elapsed_s if chunks else None,
    )


def _warnings(
    runs: Sequence[LoadRun],
    client: ClientUse,
    calls: Sequence[TimedCall],
    good: Sequence[TimedCall],
    server: ServerCounters | None,
    saturated: bool | None,
) -> Iterable[str]:
    if client.cpu_share > BUSY_SHARE:
        yield (
            f"the client used {client.cpu_share:.0%} of a core: the client, not the server, may be "
            "the limit; use more --processes"
        )
    late_s = client.send_lag_s.p99 or 0.0
    if late_s > LATE_S:
        yield f"1 % of the calls were sent more than {late_s * 1e3:.0f} ms late: the client lags"
    if calls and runs[0].open_loop:
        in_time = sum(call.sent_s - call.scheduled_s <= LATE_S for call in calls) / len(calls)
        if in_time < MIN_IN_TIME:
            yield f"only {in_time:.1%} of the calls were sent in time: the load was too low"
    if saturated:
        yield "calls queue up: the server cannot keep up, and latencies grow with the run"
    if any(call.counted_by == "chunks" for call in good):
        yield "the server counts no tokens: each chunk with output counts as one"
    if any(part.gave_up for run in runs for part in run.parts):
        yield "every call failed: sending was stopped"
    counted = None if server is None else server.output_tokens
    if counted is not None and good and len(good) == len(calls):
        seen = sum(call.output_tokens for call in good)
        if counted != seen and not any(run.interrupted for run in runs):
            yield f"the server counted {counted:,} output tokens, its answers {seen:,}"


def _estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its 95 % interval, by Student's t with n - 1 degrees of freedom."""
    count, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student95(count - 1) * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half)


def _record(run: int, call: TimedCall) -> MeasuredRecord | FailedRecord:
    common: dict[str, Any] = {
        "index": call.index,
        "run": run,
        "arrival_s": call.scheduled_s,
        "sent_s": call.sent_s,
        "prompt_tokens": call.prompt_tokens,
        "session": call.session,
    }
    if call.error is not None:
        error, detail = call.error.label, call.error.detail
        return FailedRecord(end_s=call.end_s, error=error, detail=detail, **common)
    return MeasuredRecord(
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
