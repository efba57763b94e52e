"""`cbatch report`: compare measured or simulated reports, in a table or on an HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    page.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="records of each report, in the same order, for distributions and single requests",
    )
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
    documents = []
    for one, other in pairs:
        rows = list(compare(one, other))
        console.print(_table(args, one, other, rows))
        documents.append(_document(one, other, rows))
    document = {"a": str(args.first), "b": str(args.second), "results": documents}
    print_figures(document, args.json)
    return 0


def run_page(args: argparse.Namespace) -> int:
    """Write a page that draws all reports on the same axes."""
    reports = [_read(path) for path in args.reports]
    require_place("--page", args.page)
    if args.records and len(args.records) != len(args.reports):
        problem = f"{len(args.records)} for {len(args.reports)} reports"
        raise FieldError("--records", problem, "give each report its own, or none")
    names = _names(args.reports)
    views: list[RunView] = []
    for index, by_load in enumerate(reports):
        records = args.records[index] if args.records else None
        if records is not None and len(by_load) > 1:
            problem = f"{names[index]} is a sweep, whose records do not name their load"
            raise FieldError("--records", problem, "leave them out")
        for load, report in by_load.items():
            name = " ".join(filter(None, (names[index], load)))
            views.append(_view(name, report, records))
    write_page(args.page, " and ".join(names), views)
    print(f"written: {args.page}")
    print_line({"page": str(args.page)})
    return 0


def compare(first: Report, second: Report) -> Iterator[Row]:
    """Yield (name, first, second) for measures that a report has; times are in milliseconds."""
    for name, field in RATES:
        yield name, getattr(first, field), getattr(second, field)
    for field in SPREADS:
        for statistic in STATISTICS:
            one, other = (_ms(getattr(getattr(r, field), statistic)) for r in (first, second))
            if (one, other) != (None, None):
                yield f"{LABELS[field]}, {statistic}", one, other
    shares = [None if r.goodput is None else r.goodput.share for r in (first, second)]
    if shares != [None, None]:
        yield "goodput, share of calls", shares[0], shares[1]
    drafts = [acceptance(r) for r in (first, second)]
    if drafts != [None, None]:
        yield "drafts accepted, share", drafts[0], drafts[1]


def acceptance(report: Report) -> float | None:
    """Return the share of drafts that the simulation or the server accepted; None if unknown."""
    if report.speculation is not None:
        return report.speculation.acceptance
    server = getattr(report, "server", None)
    return None if server is None else server.acceptance


def difference(first: float | None, second: float | None) -> float | None:
    """Return the relative change from `first` to `second`; 0.1 is 10 % more."""
    return None if not first or second is None else second / first - 1


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


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3


def _table(args: argparse.Namespace, first: Report, second: Report, rows: list[Row]) -> Table:
    table = Table(title=_title(first, second), title_justify="left")
    table.add_column("")
    for report, path in ((first, args.first), (second, args.second)):
        table.add_column(f"{path.name}\n{report.kind}", justify="right")
    table.add_column("B over A", justify="right")
    for name, one, other in rows:
        change = difference(one, other)
        cells = ("-" if value is None else f"{value:,.4g}" for value in (one, other))
        table.add_row(name, *cells, "" if change is None else f"{change:+.1%}")
    return table


def _title(first: Report, second: Report) -> str:
    """Return the settings that differ between two reports of the same kind."""
    names = sorted({*first.settings, *second.settings})
    differing = [
        f"{name}: {first.settings.get(name)} / {second.settings.get(name)}"
        for name in names
        if first.settings.get(name) != second.settings.get(name) and first.kind == second.kind
    ]
    return "; ".join(differing) or f"{first.kind} and {second.kind}"


def _document(first: Report, second: Report, rows: list[Row]) -> dict[str, Any]:
    return {
        "kinds": [first.kind, second.kind],
        "measures": [
            {"name": name, "a": one, "b": other, "difference": difference(one, other)}
            for name, one, other in rows
        ],
    }


def _view(name: str, report: Report, records: Path | None) -> RunView:
    collector = PageCollector()
    try:
        for record in () if records is None else read_records(records):
            collector(record)
    except (OSError, ValueError) as error:
        remedy = "name a file that --records of cbatch bench or cbatch sim wrote"
        raise FieldError("--records", f"{records}: {error}", remedy) from error
    return collector.view(f"{name}, {report.kind}", report)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the files, or their whole paths if two names are the same."""
    short = [path.stem for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
