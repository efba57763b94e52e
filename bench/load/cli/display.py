"""Output of `cbatch bench`: a progress line during runs, then tables and the JSON line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.load.client.call import LiveTally
from bench.load.run.refusals import remedy
from bench.load.run.report import Measured, ServerCounters
from bench.load.run.runner import OfferedLoad
from bench.load.run.sweep import Point, knee_of
from cbatch.cli.console import TextConsole
from cbatch.cli.output import print_line
from sim.report.capacity import Capacity
from sim.report.display import spread_table, summary_of

LINE_EVERY_S = 5.0  # interval of progress lines if standard error is not a terminal
SPREADS = ("ttft_s", "ttft_from_send_s", "tpot_s", "itl_s", "chunk_gap_s", "e2e_s", "normalised_s")


class ProgressDisplay:
    """Progress of runs: a live line on a terminal, otherwise a line every `LINE_EVERY_S`."""

    def __init__(self, *, shown: bool) -> None:
        self._console = TextConsole(stderr=True)
        self._shown = shown
        self._is_live = shown and self._console.is_terminal
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._phase = self._load = ""
        self._last_update = (0.0, 0, 0)  # seconds, tokens and chunks at the last update
        self._line_s = 0.0

    def __enter__(self) -> ProgressDisplay:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_live:
            self._live.stop()

    def begin(self, load: OfferedLoad) -> None:
        self._load = load_name(load)

    def announce(self, phase: str) -> None:
        self._phase = phase
        self._last_update, self._line_s = (0.0, 0, 0), 0.0

    def update(self, tally: LiveTally, now_s: float) -> None:
        if not self._shown or (not self._is_live and now_s - self._line_s < LINE_EVERY_S):
            return
        self._line_s = now_s
        span_s = max(now_s - self._last_update[0], 1e-9)
        tokens, chunks = tally.tokens - self._last_update[1], tally.chunks - self._last_update[2]
        self._last_update = (now_s, tally.tokens, tally.chunks)
        # Tokens cannot be counted before the end if only the last chunk has usage.
        rate = f"{tokens / span_s:,.0f} tokens/s" if tokens else f"{chunks / span_s:,.0f} chunks/s"
        failed = f" · {tally.failed:,} failed" if tally.failed else ""
        words = (
            f"{self._load}, {self._phase} · {now_s:,.1f} s · {tally.in_flight:,} in flight · "
            f"{tally.done:,} done{failed} · {rate}"
        )
        if self._is_live:
            self._live.update(Text(words))
        else:
            self._console.print(words, soft_wrap=True)


def load_name(load: OfferedLoad) -> str:
    if load.rate_per_s is not None:
        return f"{load.rate_per_s:g} requests/s"
    return "trace" if load.concurrency is None else f"{load.concurrency} clients"


def print_points(
    points: Sequence[Point], capacity: Capacity | None = None, json_file: Path | None = None
) -> None:
    """Print failures and tables, then one JSON line: a single report, or a sweep's reports with
    its knee and the capacity that `--find-rate` found."""
    console = TextConsole()
    for line in _failures(points):
        console.print(line, soft_wrap=True, style="bold yellow")
    for point in points if len(points) < 4 else ():
        _print_report(console, load_name(point.load), point.report)
    if len(points) == 1 and capacity is None:
        print_line(summary_of(points[0].report), json_file)
        return
    knee = knee_of(points)
    console.print(_sweep_table(points, knee.load if knee is not None and knee.reached else None))
    if knee is not None and knee.reached:
        console.print(
            f"knee at {knee.load:.3g}: beyond it requests queue, at about "
            f"{knee.plateau:,.0f} output tokens/s"
        )
    elif knee is not None:
        console.print(f"no knee up to {points[-1].load.value:g}: the server can take more")
    summary: dict[str, Any] = {"results": [summary_of(point.report) for point in points]}
    summary["knee"] = msgspec.to_builtins(knee)
    if capacity is not None:
        console.print(_conclusion(capacity), soft_wrap=True)
        summary["capacity"] = msgspec.to_builtins(capacity)
    print_line(summary, json_file)


def _conclusion(capacity: Capacity) -> str:
    best = capacity.best
    if best is None:
        return f"even {capacity.tried[-1].rate:.3g} requests/s miss the objectives"
    prefix = "at least " if capacity.ends == "highest meets" else ""
    words = (
        f"objectives are met up to {prefix}{best.rate:.3g} requests/s, "
        f"{best.output_tokens_per_s or 0:,.0f} output tokens/s"
    )
    if best.too_short:
        words += "; too short to distinguish a burst from a steady load: "
        words += f"give {best.rounds_needed} x --requests"
    return words


def _failures(points: Sequence[Point]) -> Iterator[str]:
    """Yield a reason and a remedy for each kind of failure, the most frequent kind first."""
    reports = [point.report for point in points]
    sent = sum(report.sent for report in reports)
    counts = sum((Counter(report.errors) for report in reports), Counter())
    reasons = {k: v for report in reversed(reports) for k, v in report.error_examples.items()}
    for label, count in counts.most_common():
        yield f"failed: {count:,} of {sent:,} calls, {label}: {reasons[label]}"
        yield f"  remedy: {remedy(label, reasons[label])}"


def _print_report(console: Console, name: str, report: Measured) -> None:
    if report.requests:
        console.print(spread_table(name, report, SPREADS))
    for line in _lines(report):
        console.print(line, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"warning: {warning}", soft_wrap=True, style="bold yellow")


def _lines(report: Measured) -> list[str]:
    interrupted = " (interrupted)" if report.interrupted else ""
    lines = [
        f"{report.requests:,} of {report.sent:,} calls in {report.duration_s:,.2f} s"
        f"{interrupted}, {report.requests_per_s or 0:.3g}/s, {report.mean_in_flight or 0:.1f} in "
        f"flight, {report.peak_in_flight} at most",
        f"{report.output_tokens:,} output tokens ({report.output_tokens_per_s or 0:,.0f}/s"
        f"{_interval(report, 'output_tokens_per_s')}), counted by "
        f"{report.token_source}",
        f"{report.prompt_tokens:,} prompt tokens ("
        f"{report.prompt_tokens_per_s or 0:,.0f}/s computed)",
    ]
    if report.tokens_per_chunk is not None:
        lines.append(f"{report.chunks:,} chunks of {report.tokens_per_chunk:.2f} tokens")
    if report.steady is not None:
        steady = report.steady
        lines.append(
            f"steady from {steady.start_s:.1f} to {steady.end_s:.1f} s: "
            f"{steady.output_tokens_per_s:,.0f} tokens/s, {steady.requests_per_s:.3g} calls/s"
        )
    if report.goodput is not None:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in report.attainment.items())
        lines.append(
            f"goodput {report.goodput.requests_per_s:.3g} calls/s: {report.goodput.share:.1%} of "
            f"all calls met their objectives ({shares})"
        )
    if report.cut_requests:
        lines.append(f"{report.cut_requests:,} answers ended before their length")
    lines += _server_lines(report.server)
    client, lag = report.client, report.client.send_lag_s
    lines.append(
        f"client: {client.cpu_share:.0%} of a core in {client.processes} process"
        f"{'es' if client.processes > 1 else ''}, sends late by "
        f"{(lag.p50 or 0) * 1e3:.2f} ms (p99 {(lag.p99 or 0) * 1e3:.2f})"
    )
    return lines


def _server_lines(server: ServerCounters | None) -> Iterator[str]:
    if server is not None and server.acceptance is not None:
        drafts = server.drafts or 0
        shares = [count / drafts for count in server.accepted_by_position if drafts]
        positions = ", ".join(f"{share:.0%}" for share in shares[:8])
        yield (
            f"server: {server.acceptance:.1%} of {server.drafted_tokens:,} drafts accepted, "
            f"{server.accepted_length or 0:.2f} tokens a drafting step; by position {positions}"
        )
    if server is not None and server.preemptions is not None:
        hits = server.prefix_hit_tokens or 0
        yield f"server: {server.preemptions:,} preemptions, {hits:,} prompt tokens cached"


def _interval(report: Measured, name: str) -> str:
    estimate = report.confidence.get(name)
    return "" if estimate is None else f", 95 % {estimate.low:,.0f} to {estimate.high:,.0f}"


def _sweep_table(points: Sequence[Point], knee: float | None) -> Table:
    table = Table(title="loads", title_justify="left")
    columns = "load", "calls/s", "output tokens/s", "95 %", "TTFT p50", "TTFT p99", "TPOT p50"
    for column in (*columns, "TPOT p99", "good", "failed", "knee"):
        table.add_column(column, justify="right")
    for load, _, report in points:
        estimate = report.confidence.get("output_tokens_per_s")
        spread = "" if estimate is None else f"±{estimate.high - estimate.mean:,.0f}"
        good = "" if report.goodput is None else f"{report.goodput.share:.1%}"
        latencies = (report.ttft_s.p50, report.ttft_s.p99, report.tpot_s.p50, report.tpot_s.p99)
        beyond = knee is not None and load.value > knee * (1 + 1e-9)
        table.add_row(
            load_name(load),
            f"{report.requests_per_s or 0:.3g}",
            f"{report.output_tokens_per_s or 0:,.0f}",
            spread,
            *("-" if value is None else f"{value * 1e3:,.1f}" for value in latencies),
            good,
            f"{sum(report.errors.values()):,}",
            "past" if beyond else "",
        )
    return table
