"""`cbatch report`: compare measured or simulated reports, in a table or on an HTML page. The CSV
table and the page of `cbatch bench`. On the page, `running` is the number of calls in flight,
including calls that wait in the server. Other series come from the server's /metrics.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench.load.client.http import TimedCall
from bench.load.run.measure import read_times, records
from bench.load.run.report import (
    MeasuredRecord,
    ServerSample,
    number_columns,
    read_records,
    read_reports,
)
from bench.load.run.sweep import Point
from bench.report import print_table
from cbatch.cli.output import add_json_option, print_figures, print_line, require_place
from cbatch.core.request.errors import FieldError
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.report import Report
from sim.report.timeline import INTERVALS, Series
from sim.workload.traces.files import read_whole


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    compare = actions.add_parser(
        "compare",
        help="show two reports and their differences",
        description="Compare two runs, or a run and its simulation; of sweeps, the common loads.",
    )
    compare.add_argument("first", type=Path, metavar="A")
    compare.add_argument("second", type=Path, metavar="B")
    add_json_option(compare, "the differences")
    compare.set_defaults(run=run)
    page = actions.add_parser(
        "page",
        help="draw reports on one page",
        description="Draw all loads of each report; others are compared with the first report.",
    )
    page.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    page.add_argument("--page", type=Path, required=True, metavar="FILE", help="HTML file to write")
    text = "records of each report, in the same order, for distributions and single requests"
    page.add_argument("--records", nargs="+", type=Path, default=[], metavar="FILE", help=text)
    page.set_defaults(run=run_page)


def run(args: argparse.Namespace) -> int:
    first, second = _read(args.first), _read(args.second)
    # Two single reports are compared whatever their loads; sweeps are compared load by load.
    if len(first) == len(second) == 1:
        pairs = [(*first.values(), *second.values())]
    else:
        pairs = [(first[name], second[name]) for name in first if name in second]
    if not pairs:
        raise FieldError("A and B", "have no load in common", "sweep over the same loads")
    results = []
    for pair in pairs:
        one, other = map(_figures, pair)
        measures, rows = [], []
        heads = [
            f"{p.name}\n{r.kind}" for p, r in zip((args.first, args.second), pair, strict=True)
        ]
        heads[1] += " " * (heads[0] == heads[1])
        for name in one | other:
            a, b = one.get(name), other.get(name)
            change = None if not a or b is None else b / a - 1
            measures.append({"name": name, "a": a, "b": b, "difference": change})
            over = "" if change is None else f"{change:+.1%}"
            rows.append({"": name, heads[0]: a, heads[1]: b, "B over A": over})
        print_table(_title(*pair), rows)
        results.append({"kinds": [report.kind for report in pair], "measures": measures})
    document = {"a": str(args.first), "b": str(args.second), "results": results}
    print_figures(document, args.json)
    return 0


def run_page(args: argparse.Namespace) -> int:
    reports = [_read(path) for path in args.reports]
    require_place("--page", args.page)
    if args.records and len(args.records) != len(args.reports):
        problem = f"{len(args.records)} for {len(args.reports)} reports"
        raise FieldError("--records", problem, "give each report its own, or none")
    names = [path.stem for path in args.reports]
    if len(set(names)) < len(names):
        names = [str(path) for path in args.reports]
    views: list[RunView] = []
    for name, by_load, path in zip_longest(names, reports, args.records):
        if path is not None and len(by_load) > 1:
            problem = f"{name} is a sweep, whose records do not name their load"
            raise FieldError("--records", problem, "leave them out")
        for load, report in by_load.items():
            collector = PageCollector()
            try:
                for record in () if path is None else read_records(path):
                    collector(record)
            except (OSError, ValueError) as error:
                remedy = "name a file that --records of cbatch bench or cbatch sim wrote"
                raise FieldError("--records", f"{path}: {error}", remedy) from error
            title = " ".join(filter(None, (name, load)))
            views.append(collector.view(f"{title}, {report.kind}", report))
    write_page(args.page, " and ".join(names), views)
    print(f"written: {args.page}")
    print_line({"page": str(args.page)})
    return 0


def _figures(report: Report) -> dict[str, float]:
    """Return the numbers of a report by the names of its JSON; times are in seconds."""
    figures = number_columns(report)
    figures.pop("version")
    source = report.speculation or getattr(report, "server", None)
    for name, part, field in (
        ("goodput_share", report.goodput, "share"),
        ("acceptance", source, "acceptance"),
    ):
        value = getattr(part, field, None)
        if value is not None:
            figures[name] = value
    return figures


def _read(path: Path) -> dict[str, Report]:
    """Return the reports of a file by name of their load. Raises `FieldError`."""
    try:
        reports, names = read_reports(read_whole(path))
    except OSError as error:
        raise FieldError(str(path), str(error), "name a report") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        remedy = "write one with --json of cbatch bench or cbatch sim"
        raise FieldError(str(path), f"is not a report ({error})", remedy) from error
    return dict(zip(names, reports, strict=True))


def _title(first: Report, second: Report) -> str:
    differing = [
        f"{name}: {first.settings.get(name)} / {second.settings.get(name)}"
        for name in sorted({*first.settings, *second.settings})
        if first.settings.get(name) != second.settings.get(name) and first.kind == second.kind
    ]
    return "; ".join(differing) or f"{first.kind} and {second.kind}"


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """Write the CSV file. Columns have the names of the JSON report; a spread has a column per
    figure, such as `ttft_s.p50`. Missing values are empty."""
    rows = []
    for load, _, report in points:
        row: dict[str, Any] = {**load.as_settings(), **number_columns(report)}
        row["failed"] = sum(report.errors.values())
        row["goodput_share"] = None if report.goodput is None else report.goodput.share
        row |= {f"met.{name}": share for name, share in report.attainment.items()}
        row["client_cpu_share"] = report.client.cpu_share
        if report.server is not None:
            row |= {f"server.{name}": n for name, n in number_columns(report.server).items()}
        rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(dict.fromkeys(n for r in rows for n in r)))
        table.writeheader()
        table.writerows(rows)


def write_points(path: Path, title: str, points: Sequence[Point]) -> None:
    """Write a page with a run per load. A load that was run several times has no time series."""
    views = []
    for load, runs, report in points:
        collector = PageCollector()
        for record in records(runs):
            if isinstance(record, MeasuredRecord):
                collector(record)
        series = series_of(runs[0].calls, runs[0].server_samples) if len(runs) == 1 else None
        words = [f"{name} {n:g}" for name, n in load.as_settings().items() if n is not None]
        views.append(collector.view(", ".join(words) or "trace", report, series))
    write_page(path, title, views)


def series_of(calls: Sequence[TimedCall], samples: Sequence[ServerSample] = ()) -> Series | None:
    """Return series over time from the first scheduled send on, with linear interpolation between
    `samples` of the server. None if no call succeeded, or if the run took no time."""
    good = [call for call in calls if call.error is None]
    if not good:
        return None
    first_s = min(call.scheduled_s for call in calls)
    edges_s = np.linspace(first_s, max(call.end_s for call in good), INTERVALS + 1)
    length_s = float(edges_s[1] - edges_s[0])
    if length_s <= 0:
        return None
    names = ("drafted_tokens", "accepted_tokens", "prompt_tokens", "prefix_hit_tokens")
    curves = [_curve(samples, name, edges_s) for name in names]
    drafted, accepted, prompts, hits = (None if c is None else np.diff(c) for c in curves)
    acceptance: list[float | None] = [None] * INTERVALS
    if drafted is not None and accepted is not None:
        pairs = zip(drafted.tolist(), accepted.tolist(), strict=True)
        acceptance = [float(f"{a / d:.5g}") if d > 0 else None for d, a in pairs]
    if prompts is not None:
        prompts = np.maximum(prompts - (0.0 if hits is None else hits), 0.0) / length_s
    stamps_s, tokens = read_times(good)
    sent_s, end_s = np.array([(call.sent_s, call.end_s) for call in calls]).T
    in_flight_s = [(np.clip(edge_s, sent_s, end_s) - sent_s).sum() for edge_s in edges_s]
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    return Series(
        first_s=first_s,
        length_s=length_s,
        running=_rounded(np.diff(in_flight_s) / length_s),
        waiting=_rounded(_curve(samples, "waiting", middles_s)),
        kv_share=_rounded(_curve(samples, "kv_share", middles_s)),
        output_tokens_per_s=_rounded(np.histogram(stamps_s, edges_s, weights=tokens)[0] / length_s),
        prompt_tokens_per_s=_rounded(prompts),
        step_s=_rounded(None),
        drafted_per_row=_rounded(None),
        acceptance=acceptance,
    )


def _curve(samples: Sequence[ServerSample], name: str, at_s: np.ndarray) -> np.ndarray | None:
    """Return a field of the samples at these times, or None if a value is missing."""
    values = [getattr(sample, name) for sample in samples]
    if not values or None in values:
        return None
    curve: np.ndarray = np.interp(at_s, [sample.at_s for sample in samples], values)
    return curve


def _rounded(values: np.ndarray | None) -> list[float | None]:
    if values is None:
        return [None] * INTERVALS
    return [float(f"{value:.5g}") for value in values.tolist()]
