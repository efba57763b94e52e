"""`cbatch report page`: reports as a page, a run and its simulation on the same axes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.cli.tracefile import require_place
from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from sim.page.view import RunView
    from sim.report import Report

Reports = dict[str, "Report"]  # by load; a single one by ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--page", type=Path, required=True, metavar="FILE", help="an HTML page")
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="the records of each report, in their order: distributions and single requests",
    )


def write(args: argparse.Namespace, reports: Sequence[Reports]) -> None:
    """`reports` are those of `args.reports`. Raises `FieldError`."""
    from sim.page.view import write_page

    require_place("--page", args.page)
    if args.records and len(args.records) != len(args.reports):
        many = f"{len(args.records)} for {len(args.reports)} reports"
        raise FieldError("--records", many, "give each report its own, or none")
    names = _names(args.reports)
    views: list[RunView] = []
    for index, found in enumerate(reports):
        records = args.records[index] if args.records else None
        if records is not None and len(found) > 1:
            sweep = f"{names[index]} is a sweep, whose records do not tell their load"
            raise FieldError("--records", sweep, "leave them out")
        for load, report in found.items():
            name = " ".join(filter(None, (names[index], load)))
            views.append(_view(name, report, records))
    write_page(args.page, " and ".join(names), views)


def _view(name: str, report: Report, records: Path | None) -> RunView:
    from bench.load.report import read_records
    from sim.page.view import Collector

    collector = Collector()
    try:
        for record in () if records is None else read_records(records):
            collector(record)
    except (OSError, ValueError) as error:
        remedy = "name a file that --records of cbatch bench or cbatch sim wrote"
        raise FieldError("--records", f"{records}: {error}", remedy) from error
    return collector.view(f"{name}, {report.kind}", report)


def _names(paths: Sequence[Path]) -> list[str]:
    """File names, with their folders where they are the same."""
    short = [path.stem for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
