"""Options of `cbatch sim` and `cbatch sim capacity`: --sweep, and the report's files."""

from __future__ import annotations

import argparse
from pathlib import Path

from cbatch.cli.output import add_json_option
from cbatch.core.request.errors import FieldError


def add_report_options(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("report")
    add_json_option(out, "the whole report")
    out.add_argument("--records", type=Path, metavar="FILE", help="write one JSON line per request")
    out.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page of plots")
    out.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a Perfetto trace of the steps"
    )


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=V1,V2",
        help="run with each value of an option (on, off for a switch); repeatable: all "
        "combinations; values that contain commas are separated by semicolons",
    )
    group.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="scenarios in parallel (default: number of cores)",
    )


def refuse_processes_without_sweep(args: argparse.Namespace) -> None:
    if args.processes is not None and not args.sweep:
        raise FieldError("--processes", "would be ignored without --sweep", "leave it out")
