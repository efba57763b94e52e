"""`cbatch report`: compare measured or simulated reports, in a table or on an HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product, zip_longest
from pathlib import Path

from rich.table import Table

from bench.load.run.report import read_records, read_reports
from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option, print_figures, print_line, require_place
from cbatch.core.request.errors import FieldError
from sim.report.display import LABELS
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.report import Report
from sim.workload.traces.files import read_whole

RATES = (
    ("requests that finished", "requests"),
    ("duration, s", "duration_s"),
    ("requests/s", "requests_per_s"),
    ("output tokens/s", "output_tokens_per_s"),
    ("computed prompt tokens/s", "prompt_tokens_per_s"),
)
SPREADS = ("ttft_s", "tpot_s", "itl_s", "chunk_gap_s", "e2e_s", "queue_s")
STATISTICS = ("mean", "p50", "p90", "p99")
Row = tuple[str, float | None, float | None]


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
    console = TextConsole()
    results = []
    for pair in pairs:
        table = Table(title=_title(*pair), title_justify="left")
        table.add_column("")
        for report, path in zip(pair, (args.first, args.second), strict=True):
            table.add_column(f"{path.name}\n{report.kind}", justify="right")
        table.add_column("B over A", justify="right")
        measures = []
        for name, one, other in compare(*pair):
            change = None if not one or other is None else other / one - 1
            cells = ("-" if value is None else f"{value:,.4g}" for value in (one, other))
            table.add_row(name, *cells, "" if change is None else f"{change:+.1%}")
            measures.append({"name": name, "a": one, "b": other, "difference": change})
        console.print(table)
        results.append({"kinds": [report.kind for report in pair], "measures": measures})
    document = {"a": str(args.first), "b": str(args.second), "results": results}
    print_figures(document, args.json)
    return 0


def run_page(args: argparse.Namespace) -> int:
    """Write a page that draws all reports on the same axes."""
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


def compare(first: Report, second: Report) -> Iterator[Row]:
    """Yield (name, first, second) for measures that a report has; times are in milliseconds."""
    both = (first, second)

    def pair(name: str, value: Callable[[Report], float | None]) -> Iterator[Row]:
        one, other = map(value, both)
        if (one, other) != (None, None):
            yield name, one, other

    for name, field in RATES:
        yield name, getattr(first, field), getattr(second, field)
    for field, statistic in product(SPREADS, STATISTICS):
        spreads = [getattr(report, field) for report in both]
        one, other = (
            None if (value_s := getattr(spread, statistic)) is None else 1e3 * value_s
            for spread in spreads
        )
        if (one, other) != (None, None):
            yield f"{LABELS[field]}, {statistic}", one, other
    yield from pair(
        "goodput, share of calls", lambda r: None if r.goodput is None else r.goodput.share
    )
    yield from pair("drafts accepted, share", acceptance)


def acceptance(report: Report) -> float | None:
    """Return the share of drafts that the simulation or the server accepted; None if unknown."""
    source = report.speculation or getattr(report, "server", None)
    return None if source is None else source.acceptance


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
    """Return the settings that differ between two reports of the same kind."""
    differing = [
        f"{name}: {first.settings.get(name)} / {second.settings.get(name)}"
        for name in sorted({*first.settings, *second.settings})
        if first.settings.get(name) != second.settings.get(name) and first.kind == second.kind
    ]
    return "; ".join(differing) or f"{first.kind} and {second.kind}"
