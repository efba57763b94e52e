"""`cbatch trace`: show, convert, sample and scale traces of requests."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option, print_figures
from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError
from sim.cli import trace_generate
from sim.cli.scenario import PacedTrace, TraceFile
from sim.cli.trace_generate import checked_seed, write_trace
from sim.workload.options import OpenedTrace
from sim.workload.traces.changes import sample, scale
from sim.workload.traces.plot import save_plot
from sim.workload.traces.reader import sort_requests
from sim.workload.traces.request import TraceRequest
from sim.workload.traces.statistics import summarise


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "trace",
        description="Read traces of Azure, Mooncake, BurstGPT, Bailian, Vidur and ServeGen, "
        "results of vLLM bench and logs of cbatch; write request logs with one JSON line per "
        "request.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    trace_generate.add_parser(actions)
    show = actions.add_parser("show", help="print statistics of a trace")
    add_flags(show, TraceFile)
    show.add_argument("--plot", type=Path, metavar="PNG", help="draw rate, lengths and gaps")
    show.add_argument("--seed", type=int, help="seed for --spread")
    add_json_option(show, "the statistics")
    show.set_defaults(run=run_show)

    convert = _writer(actions, "convert", "write a trace as a request log of cbatch", run_convert)
    convert.add_argument("--sort", action="store_true", help="sort by arrival, in memory")

    keep = _writer(actions, "sample", "keep some requests of a trace", run_sample)
    keep.add_argument(
        "--share", type=float, default=1.0, help="share of requests to keep, in whole sessions"
    )
    keep.add_argument(
        "--requests", type=int, metavar="N", help="keep the first N requests (of the share)"
    )
    keep.add_argument(
        "--window",
        type=_window,
        default=(0.0, math.inf),
        metavar="START:END",
        help="seconds to keep",
    )

    change = _writer(
        actions, "scale", "change the rate or lengths of a trace", run_scale, PacedTrace
    )
    change.add_argument("--prompt", type=float, default=1.0, help="factor on prompt lengths")
    change.add_argument("--output", type=float, default=1.0, help="factor on output lengths")


def _writer(
    actions: Any, name: str, summary: str, run: Any, kind: type[TraceFile] = TraceFile
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary)
    add_flags(parser, kind)
    parser.add_argument("out", type=Path, metavar="OUT", help=".jsonl or .jsonl.gz file to write")
    parser.add_argument("--seed", type=int, help="seed of random draws (default: 0)")
    parser.set_defaults(run=run)
    return parser


def _window(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    try:
        return float(start or 0), float(end or math.inf)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write START:END in seconds") from error


def run_show(args: argparse.Namespace) -> int:
    trace = _open(args)
    summary = summarise(trace.requests())
    if args.plot is not None:
        save_plot(args.plot, trace.path.name, summary)
    statistics = msgspec.to_builtins(summary.statistics)
    console = TextConsole()
    console.print(_table(trace, statistics))
    header = {"trace": trace.path.name, "format": trace.format, "skipped": trace.skipped}
    print_figures(header | statistics, args.json)
    return 0


def run_convert(args: argparse.Namespace) -> int:
    trace = _open(args, in_order=not args.sort)
    requests = trace.requests()
    return _write(args, trace, sort_requests(requests) if args.sort else requests)


def run_sample(args: argparse.Namespace) -> int:
    if args.share == 1 and args.requests is None and args.window == (0.0, math.inf):
        raise FieldError("sample", "keeps everything", "give --share, --requests or --window")
    trace = _open(args, drawing=args.share < 1)
    sampled = sample(
        trace.requests(),
        share=args.share,
        max_requests=args.requests,
        start_s=args.window[0],
        end_s=args.window[1],
        seed=args.seed or 0,
    )
    return _write(args, trace, sampled)


def run_scale(args: argparse.Namespace) -> int:
    file = read_settings(PacedTrace, args).values
    if file.rate is None is file.rate_scale and args.prompt == args.output == 1:
        remedy = "give --rate, --rate-scale, --prompt or --output"
        raise FieldError("scale", "changes nothing", remedy)
    factors = {"prompt": args.prompt, "output": args.output}
    trace = _open(args)
    changed = scale(trace.requests(), rate=file.scale_of(trace.requests), **factors)
    return _write(args, trace, changed)


def _open(args: argparse.Namespace, *, in_order: bool = True, drawing: bool = False) -> OpenedTrace:
    file = read_settings(TraceFile, args).values
    trace = OpenedTrace(file.trace, file, args.seed or 0, in_order=in_order)
    checked_seed(args, drawing=drawing or trace.draws)
    return trace


def _write(args: argparse.Namespace, trace: OpenedTrace, requests: Iterable[TraceRequest]) -> int:
    if args.out.exists() and args.out.samefile(trace.path):
        raise FieldError("OUT", f"{args.out} is the trace itself", "write to another file")
    return write_trace(args.out, requests, f"from {trace.format}", lambda: trace.skipped)


def _table(trace: OpenedTrace, statistics: dict[str, Any]) -> Table:
    table = Table(title=f"{trace.path.name} ({trace.format})", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    shared = statistics["shared_prefix_share"]
    for name, value in (
        ("requests", f"{statistics['requests']:,}"),
        ("left out as empty", f"{trace.skipped:,}" if trace.skipped else None),
        ("time span", _span(statistics["span_s"])),
        ("requests/s", _number(statistics["rate_per_s"], ".3g")),
        ("CV of gaps (Poisson: 1)", _number(statistics["gap_cv"], ".3g")),
        ("same timestamp as the one before", f"{statistics['same_stamp_share']:.1%}"),
        ("busiest minute over mean", _number(statistics["peak_minute_ratio"], ".2f")),
        ("minutes without a request", f"{statistics['empty_minutes']:,}"),
        ("prompt tokens", _lengths(statistics["prompt_tokens"])),
        ("output tokens", _lengths(statistics["output_tokens"])),
        ("sessions", _number(statistics["sessions"], ",")),
        ("prompt tokens shared with earlier ones", _number(shared, ".1%")),
    ):
        if value is not None:
            table.add_row(name, value)
    return table


def _lengths(spread: dict[str, float]) -> str:
    cuts = "  ".join(f"{name} {spread[name]:,.0f}" for name in ("p50", "p90", "p99", "max"))
    return f"mean {spread['mean']:,.0f}  {cuts}"


def _span(seconds: float) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours:.0f} h {rest / 60:.0f} min" if hours else f"{seconds:.4g} s"


def _number(value: float | None, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)
