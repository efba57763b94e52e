"""Output of a simulation: progress on a terminal, tables, the JSON line, and report files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress

from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option, is_file_path, print_line, require_place
from sim.replay.replica import Progress as ReplayProgress
from sim.report.display import spread_table, summary_of
from sim.report.page.view import PageCollector, write_page
from sim.report.perfetto import PerfettoTrace
from sim.report.report import Record, Report, to_json, to_line
from sim.report.timeline import Observer, Timeline

# Settings of a report that say where step costs come from.
COST_SETTINGS = (
    "cost",
    "gpu",
    "machine",
    "model",
    "draft_model",
    "tensor_parallel_size",
    "step_duration_s",
)
_SPREADS = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")


def replay_bar(bar: Progress, prefix: str = "") -> Callable[[ReplayProgress], None]:
    """Return a function that shows the state of a simulation in a bar's only line."""
    task = bar.task_ids[0] if bar.task_ids else bar.add_task("", total=None)

    def show(state: ReplayProgress) -> None:
        words = (
            f"{prefix}{state.now_s:,.1f} s simulated · {state.finished:,} done · "
            f"{state.running} running · {state.waiting} waiting · steps"
        )
        bar.update(task, completed=state.steps, description=words)

    return show


def add_report_options(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("report")
    add_json_option(out, "the whole report")
    out.add_argument("--records", type=Path, metavar="FILE", help="write one JSON line per request")
    out.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page of plots")
    out.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a Perfetto trace of the steps"
    )


class ReportFiles:
    """Report files of the options --json, --records, --page and --perfetto. Records and Perfetto
    events are written during the run, the other two files by `write`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._open = ExitStack()
        self.observers: list[Observer] = []
        self._consumers: list[Callable[[Record], Any]] = []
        for name in ("json", "records", "page", "perfetto"):
            require_place(f"--{name}", getattr(args, name))

    def __enter__(self) -> ReportFiles:
        args = self._args
        if args.records is not None:
            file = self._open.enter_context(args.records.open("wb"))
            self._consumers.append(lambda record: file.write(to_line(record)))
        if args.page is not None:
            self._collector, self._timeline = PageCollector(), Timeline()
            self._consumers.append(self._collector)
            self.observers.append(self._timeline)
        if args.perfetto is not None:
            self.observers.append(self._open.enter_context(PerfettoTrace(args.perfetto)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    @property
    def on_record(self) -> Callable[[Record], None] | None:
        return self._consume if self._consumers else None

    def _consume(self, record: Record) -> None:
        for consume in self._consumers:
            consume(record)

    def write(self, report: Report) -> None:
        """Write the files that need the whole report: --json and --page."""
        args = self._args
        if is_file_path(args.json):
            args.json.write_bytes(to_json(report))
        if args.page is not None:
            name = f"{report.settings['trace']}, lookahead {report.settings['lookahead']}"
            view = self._collector.view(name, report, self._timeline.series())
            write_page(args.page, name, [view])


def print_report(report: Report, json_file: Path | None) -> None:
    console = TextConsole()
    console.print(describe_costs(report.settings), soft_wrap=True)
    console.print(spread_table(str(report.settings["trace"]), report, _SPREADS))
    for line in _lines(report):
        console.print(line, soft_wrap=True)
    print_line(summary_of(report), json_file)


def describe_costs(*scenarios: dict[str, Any]) -> str:
    """Return a line with the device, the model and the source of step costs. `scenarios` are the
    settings of reports."""
    words = {name: name.replace("_", " ") for name in COST_SETTINGS}
    sources = (
        ", ".join(f"{words[n]} {s[n]}" for n in words if s.get(n) is not None) for s in scenarios
    )
    return f"simulated: {'; '.join(dict.fromkeys(sources))}"


def overload_sentence(reports: Sequence[Report]) -> str:
    growths = (report.ttft_growth for report in reports)
    by_row = ", ".join("-" if growth is None else f"{growth:.3g} s" for growth in growths)
    return (
        "overloaded: requests arrive faster than they are served; with every second of arrivals, "
        f"the time to first token grows by {by_row}"
    )


def _lines(report: Report) -> list[str]:
    running = "" if report.mean_running is None else f", {report.mean_running:.1f} running"
    rate = "" if report.requests_per_s is None else f" ({report.requests_per_s:.3g}/s)"
    lines = [
        f"{report.requests:,} requests{rate} in {report.duration_s:,.1f} s, "
        f"{report.steps:,} steps{running}, {report.preemptions:,} preemptions",
        f"{report.output_tokens:,} output tokens ({report.output_tokens_per_s or 0:,.0f}/s), "
        f"{report.prefix_hit_tokens:,} of {report.prompt_tokens:,} prompt tokens from the cache",
    ]
    if report.ttft_growth is not None:
        lines.append(overload_sentence([report]))
    if report.speculation is not None and report.speculation.acceptance is not None:
        speculation = report.speculation
        lines.append(
            f"{speculation.acceptance:.1%} of {speculation.drafted_tokens:,} drafts accepted, "
            f"{speculation.tokens_per_step or 0:.2f} tokens per row and step"
        )
    if report.goodput is not None:
        lines.append(
            f"goodput {report.goodput.requests_per_s:.3g} requests/s: "
            f"{report.goodput.share:.1%} of all requests met their objectives"
        )
    for number, replica in enumerate(report.replicas or ()):
        lines.append(
            f"replica {number}: {replica.requests:,} requests, "
            f"{replica.mean_running or 0:.1f} running, "
            f"{replica.prefix_hit_tokens:,} of {replica.prompt_tokens:,} prompt tokens from the "
            f"cache, {replica.preemptions:,} preemptions"
        )
    if report.tokens_per_dollar is not None:
        lines.append(f"{report.tokens_per_dollar:,.0f} output tokens per dollar")
    lines += report.remarks
    if "as_recorded" in report.settings:
        lines.append(f"taken from the step log: {', '.join(report.settings['as_recorded'])}")
    if report.cut_requests:
        lines.append(f"{report.cut_requests:,} outputs cut at the end of context or pool")
    if report.refused:
        first = report.refused[0]
        lines.append(
            f"{len(report.refused):,} refused, the first: request {first.index}: {first.reason}"
        )
    return lines
