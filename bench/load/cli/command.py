"""`cbatch bench`: load-test a server of the OpenAI API, cbatch or any other."""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.live import Live
from rich.text import Text

from bench.load.cli.report import write_csv, write_points
from bench.load.client.http import Endpoint, HttpClient, LiveTally
from bench.load.run.drive import event_loop_runner
from bench.load.run.measure import LoadRun, measure, records
from bench.load.run.options import GOODPUT_SHARE, LoadOptions, OfferedLoad, Workload
from bench.load.run.report import Measured
from bench.load.run.selftest import self_test
from bench.load.run.sweep import Point, Runner, document_of, find_model, find_rate, knee_of, sweep
from bench.report import print_table
from cbatch.cli.console import TextConsole
from cbatch.cli.output import INTERRUPTED, add_json_option, is_file_path, print_line, require_place
from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError
from sim.report.capacity import Capacity
from sim.report.display import spread_table, summary_of
from sim.report.report import parse_objectives, to_json, to_line

EPILOG = """\
Latencies count from the time at which a request was due. A 200 that is empty, cut or malformed is
an error. The report has the definitions of cbatch sim. Without --rate or --trace the load is a
closed loop of --concurrency clients.
"""
FAILED_RUN = 1  # exit status if too many calls failed
LINE_EVERY_S = 5.0  # interval of progress lines if standard error is not a terminal
SPREADS = ("ttft_s", "ttft_from_send_s", "tpot_s", "itl_s", "chunk_gap_s", "e2e_s", "normalised_s")
_REMEDIES = {  # by label of the failure
    "not connected": "start the server, or fix the URL",
    "status 401|status 403": "give --api-key, or set CBATCH_API_KEY",
    "status 404|status 405": "fix the URL or --model, or choose the endpoint (--chat)",
    "status 429|status 503": "lower --concurrency or --rate",
    "timeout": "raise --timeout, or lower --concurrency or --rate",
    "client": "lower --concurrency, or raise the limit of open files (ulimit -n)",
    "no usage": "leave out --no-stream, so that chunks can be counted",
    "malformed": "give --no-stream, or fix the URL",
}
_CHANGES = {  # by word in the server's message
    "continuous_usage_stats": "give --final-usage",
    "stream_options": "give --field stream_options=null",
    "ignore_eos": "give --no-ignore-eos",
    "temperature": "change --temperature",
    "max_completion_tokens": "give --field max_completion_tokens=N",
    "messages": "give --chat",
    "context|max_tokens": "lower --prompt-tokens or --output-tokens",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s URL [options]",
        description="Load a server of the OpenAI API and measure what its clients see.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, LoadOptions, defaults={"goodput_share": GOODPUT_SHARE})
    add_json_option(parser, "the whole report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = replace(read_settings(LoadOptions, args).values, json=args.json)
    if options.self_test:
        return self_test(options.processes)
    if options.url is None:
        raise FieldError("URL", "is missing", "name the server, as http://localhost:8000")
    for option in ("json", "csv", "records", "page"):
        require_place(f"--{option}", getattr(options, option))
    with suppress(ImportError):  # Windows
        import resource

        # Every connection needs a file descriptor.
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    options = replace(options, api_key=options.api_key or os.environ.get("CBATCH_API_KEY"))
    status: int = event_loop_runner()(_bench(options))
    return status


async def _bench(options: LoadOptions) -> int:
    objectives = parse_objectives(options.slo)
    endpoint, loads = Endpoint.of(str(options.url)), options.loads
    workload = Workload(options)
    client = HttpClient(endpoint, key=options.api_key, timeout_s=options.timeout)
    try:
        bodies = await workload.bodies(client, options.model or await find_model(client))
    finally:
        client.close()
    settings = {"url": endpoint.url, "model": bodies.model, **options.reported}
    settings["temperature"] = bodies.fields["temperature"]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)

    def report(load: OfferedLoad, runs: list[LoadRun]) -> Measured:
        return measure(runs, settings=settings | load.as_settings(), objectives=objectives)

    capacity: Capacity | None = None
    with ProgressDisplay(shown=not options.quiet) as view:
        runner = Runner(options, endpoint, bodies, workload.requests, stop=stop, view=view)
        if options.find_rate:
            share = options.goodput_share or GOODPUT_SHARE
            points, capacity = await find_rate(runner, loads[0].value, share, report)
        else:
            points = await sweep(runner, loads, report, doubling=options.sweep)
    if not points:
        print("cbatch: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    print_points(points, capacity, options.json)
    _write(options, points, capacity)
    if stop.is_set():
        return INTERRUPTED
    if options.find_rate:  # failures above the best rate are expected
        return 0 if capacity is not None and capacity.best is not None else FAILED_RUN
    failed = sum(sum(point.report.errors.values()) for point in points)
    share = failed / max(sum(point.report.sent for point in points), 1)
    return FAILED_RUN if share > options.max_errors else 0


def _write(options: LoadOptions, points: list[Point], capacity: Capacity | None) -> None:
    """Write the files of --json, --csv, --records and --page. Raises `FieldError`."""
    try:
        if is_file_path(options.json):
            options.json.write_bytes(to_json(document_of(points, capacity)))
        if options.csv is not None:
            write_csv(options.csv, points)
        if options.records is not None:
            with options.records.open("wb") as file:
                for record in (r for point in points for r in records(point.runs)):
                    file.write(to_line(record))
        if options.page is not None:
            write_points(options.page, str(options.url), points)
    except OSError as error:
        raise FieldError("report", f"cannot be written ({error})", "make room for it") from error


class ProgressDisplay:
    """Progress of runs: a live line on a terminal, otherwise a line every `LINE_EVERY_S`."""

    def __init__(self, *, shown: bool) -> None:
        self._console = TextConsole(stderr=True)
        self._shown, self._is_live = shown, shown and self._console.is_terminal
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._phase = ""
        self._last = (0.0, LiveTally())  # seconds and counts at the last update

    def __enter__(self) -> ProgressDisplay:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def announce(self, load: str, phase: str) -> None:
        self._phase, self._last = f"{load}, {phase}", (0.0, LiveTally())

    def update(self, tally: LiveTally, now_s: float) -> None:
        last_s, last = self._last
        if not self._shown or now_s - last_s < (0 if self._is_live else LINE_EVERY_S):
            return
        self._last = (now_s, copy.copy(tally))
        span_s = max(now_s - last_s, 1e-9)
        tokens, chunks = tally.tokens - last.tokens, tally.chunks - last.chunks
        # Tokens cannot be counted before the end if only the last chunk has usage.
        rate = f"{tokens / span_s:,.0f} tokens/s" if tokens else f"{chunks / span_s:,.0f} chunks/s"
        failed = f" · {tally.failed:,} failed" if tally.failed else ""
        counts = f"{tally.in_flight:,} in flight · {tally.done:,} done{failed} · {rate}"
        words = f"{self._phase} · {now_s:,.1f} s · {counts}"
        if self._is_live:
            self._live.update(Text(words))
        else:
            self._console.print(words, soft_wrap=True)


def print_points(
    points: Sequence[Point], capacity: Capacity | None = None, json_file: Path | None = None
) -> None:
    """Print failures and tables, then one JSON line: a single report, or a sweep's reports with
    its knee and the capacity that `--find-rate` found."""
    console = TextConsole(soft_wrap=True)
    for line in _failures(points):
        console.print(line, style="bold yellow")
    for load, _, report in points if len(points) < 4 else ():
        if report.requests:
            console.print(spread_table(load.name, report, SPREADS), soft_wrap=False)
        for line in _lines(report):
            console.print(line)
        for warning in report.warnings:
            console.print(f"warning: {warning}", style="bold yellow")
    if len(points) == 1 and capacity is None:
        print_line(summary_of(points[0].report), json_file)
        return
    knee = knee_of(points)
    reached = knee is not None and knee.reached
    limit = knee.load if knee is not None and reached else None
    print_table("loads", list(_sweep_rows(points, limit)))
    if knee is not None:
        console.print(
            f"knee at {knee.load:.3g}: beyond it requests queue, at about "
            f"{knee.plateau:,.0f} output tokens/s"
            if reached
            else f"no knee up to {points[-1].load.value:g}: the server can take more"
        )
    summary: dict[str, Any] = {"results": [summary_of(point.report) for point in points]}
    summary["knee"] = msgspec.to_builtins(knee)
    if capacity is not None:
        console.print(_conclusion(capacity))
        summary["capacity"] = msgspec.to_builtins(capacity)
    print_line(summary, json_file)


def remedy(label: str, detail: str) -> str:
    remedies = [text for labels, text in _REMEDIES.items() if label in labels.split("|")]
    if label.startswith("status 4"):
        changes = _CHANGES.items()
        remedies += [text for words, text in changes if re.search(rf"\b({words})\b", detail)]
    return remedies[0] if remedies else "see the server's log"


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


def _lines(report: Measured) -> Iterator[str]:
    r, server, client, steady = report, report.server, report.client, report.steady
    lag, interval = client.send_lag_s, r.confidence.get("output_tokens_per_s")
    yield (
        f"{r.requests:,} of {r.sent:,} calls in {r.duration_s:,.2f} s"
        f"{' (interrupted)' * r.interrupted}, {r.requests_per_s or 0:.3g}/s, "
        f"{r.mean_in_flight or 0:.1f} in flight, {r.peak_in_flight} at most"
    )
    within = f", 95 % {interval.low:,.0f} to {interval.high:,.0f}" if interval else ""
    rate = f"{r.output_tokens_per_s or 0:,.0f}/s{within}"
    yield f"{r.output_tokens:,} output tokens ({rate}), counted by {r.token_source}"
    yield f"{r.prompt_tokens:,} prompt tokens ({r.prompt_tokens_per_s or 0:,.0f}/s computed)"
    if r.tokens_per_chunk is not None:
        yield f"{r.chunks:,} chunks of {r.tokens_per_chunk:.2f} tokens"
    if steady is not None:
        yield (
            f"steady from {steady.start_s:.1f} to {steady.end_s:.1f} s: "
            f"{steady.output_tokens_per_s:,.0f} tokens/s, {steady.requests_per_s:.3g} calls/s"
        )
    if r.goodput is not None:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in r.attainment.items())
        yield (
            f"goodput {r.goodput.requests_per_s:.3g} calls/s: {r.goodput.share:.1%} of all calls "
            f"met their objectives ({shares})"
        )
    if r.cut_requests:
        yield f"{r.cut_requests:,} answers ended before their length"
    if server is not None and server.acceptance is not None:
        positions = server.accepted_by_position[:8]
        yield (
            f"server: {server.acceptance:.1%} of {server.drafted_tokens:,} drafts accepted, "
            f"{server.accepted_length or 0:.2f} tokens a drafting step; by position "
            + ", ".join(f"{count / (server.drafts or 1):.0%}" for count in positions)
        )
    if server is not None and server.preemptions is not None:
        hits = server.prefix_hit_tokens or 0
        yield f"server: {server.preemptions:,} preemptions, {hits:,} prompt tokens cached"
    yield (
        f"client: {client.cpu_share:.0%} of a core (processes: {client.processes}), sends late by "
        f"{(lag.p50 or 0) * 1e3:.2f} ms (p99 {(lag.p99 or 0) * 1e3:.2f})"
    )


def _sweep_rows(points: Sequence[Point], knee: float | None) -> Iterator[dict[str, Any]]:
    for load, _, report in points:
        estimate = report.confidence.get("output_tokens_per_s")
        row: dict[str, Any] = {"load": load.name, "calls/s": report.requests_per_s}
        row["output tokens/s"] = report.output_tokens_per_s
        row["±95 %"] = None if estimate is None else estimate.high - estimate.mean
        for name, spread in (("TTFT", report.ttft_s), ("TPOT", report.tpot_s)):
            for cut in ("p50", "p99"):
                value_s = getattr(spread, cut)
                row[f"{name} {cut}"] = None if value_s is None else 1e3 * value_s
        row["good"] = None if report.goodput is None else f"{report.goodput.share:.1%}"
        row["failed"] = sum(report.errors.values())
        row["knee"] = "past" if knee is not None and load.value > knee * (1 + 1e-9) else None
        yield row
