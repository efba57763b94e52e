"""`cbatch report`: compare measured or simulated reports, in a table or on an HTML page."""

from __future__ import annotations

import argparse
from itertools import zip_longest
from pathlib import Path

from bench.load.run.report import number_columns, read_records, read_reports
from bench.report import print_table
from cbatch.cli.output import add_json_option, print_figures, print_line, require_place
from cbatch.core.request.errors import FieldError
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.report import Report
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
    """Return the settings that differ between two reports of the same kind."""
    differing = [
        f"{name}: {first.settings.get(name)} / {second.settings.get(name)}"
        for name in sorted({*first.settings, *second.settings})
        if first.settings.get(name) != second.settings.get(name) and first.kind == second.kind
    ]
    return "; ".join(differing) or f"{first.kind} and {second.kind}"
