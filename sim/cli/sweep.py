"""`--sweep`: run all combinations of options' values on the same trace with the same seed."""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE
from rich.table import Table

from cbatch.cli.console import TextConsole
from cbatch.cli.output import is_file_path, print_line
from cbatch.cli.settings import fields_of, flag_of, read_settings
from cbatch.core.request.errors import FieldError, did_you_mean
from sim.cli.display import describe_costs, overload_sentence
from sim.cli.processes import num_processes, run_scenarios
from sim.cli.scenario import Scenario, refuse_ignored
from sim.cli.simulation import build, source_of
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.report import Report, to_json
from sim.report.timeline import Timeline

_FIXED = ("trace", "slo")  # options that cannot be swept
# Figures of a report, in seconds, per second, or shares, with the headings of the table.
FIGURES: dict[str, tuple[str, Callable[[Report], float | None]]] = {
    "output_tokens_per_s": ("tokens/s", attrgetter("output_tokens_per_s")),
    "ttft_p50_s": ("TTFT\np50", attrgetter("ttft_s.p50")),
    "ttft_p99_s": ("\np99", attrgetter("ttft_s.p99")),
    "tpot_p50_s": ("TPOT\np50", attrgetter("tpot_s.p50")),
    "tpot_p99_s": ("\np99", attrgetter("tpot_s.p99")),
    "e2e_p50_s": ("E2E\np50", attrgetter("e2e_s.p50")),
    "e2e_p99_s": ("\np99", attrgetter("e2e_s.p99")),
    "goodput_share": ("goodput\nshare", lambda r: r.goodput.share if r.goodput else None),
    "goodput_requests_per_s": (
        "\nper s",
        lambda r: r.goodput.requests_per_s if r.goodput else None,
    ),
    "tokens_per_dollar": ("tokens\nper $", attrgetter("tokens_per_dollar")),
}


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


class Variant(NamedTuple):
    values: dict[str, str]  # by swept option, as typed
    scenario: Scenario


def variants(args: argparse.Namespace, *, fixed: tuple[str, ...] = ()) -> list[Variant]:
    """Return the scenarios of all combinations of swept values; the last option varies fastest.

    Without `--sweep` there is one scenario. All scenarios are checked before the first one runs.
    Options in `fixed` cannot be swept. Raises `FieldError`."""
    names = {
        known: name
        for name, setting in fields_of(Scenario).items()
        if name not in (*_FIXED, *fixed)
        for known in setting.names
    }
    sweeps: dict[str, tuple[str, list[str]]] = {}  # setting: (name as typed, values)
    for text in args.sweep:
        given, values = _parse(text, names)
        name = names[given.replace("-", "_")]
        if name in sweeps:
            raise FieldError("--sweep", f"{given} is given twice", "give all its values at once")
        sweeps[name] = given, values
        if getattr(args, name) is not None:
            raise FieldError(flag_of(name), "would be ignored: --sweep sets it", "leave it out")
    pairs = []
    for combination in itertools.product(*(values for _, values in sweeps.values())):
        values_by_name = dict(zip(sweeps, combination, strict=True))
        typed = {sweeps[name][0]: value for name, value in values_by_name.items()}
        changed = copy.copy(args)
        for name, value in values_by_name.items():
            setattr(changed, name, value)
        origins = {
            name: f"--sweep {sweeps[name][0]}={value}" for name, value in values_by_name.items()
        }
        settings = read_settings(Scenario, changed, origins=origins)
        pairs.append((Variant(typed, settings.values), settings))
    with pairs[0][1].naming():
        refuse_ignored(*(variant.scenario for variant, _ in pairs))
    for variant, settings in pairs:
        with settings.naming():
            simulation = build(variant.scenario)
            source_of(simulation.scenario, simulation.trace)
    return [variant for variant, _ in pairs]


def compare(args: argparse.Namespace, variants: list[Variant]) -> None:
    """Run the scenarios in parallel; write the files and print a table and the JSON line."""
    scenarios = [variant.scenario for variant in variants]
    processes = num_processes(args.processes, len(scenarios))
    if args.page is None:
        reports = run_scenarios(_report, scenarios, processes)
    else:
        views = run_scenarios(_view, scenarios, processes)
        reports = [view.report for view in views]
        _write_page(args.page, variants, views)
    if is_file_path(args.json):
        args.json.write_bytes(to_json(reports))
    rows = [{name: of(report) for name, (_, of) in FIGURES.items()} for report in reports]
    _print(variants, reports, rows)
    lines = [variant.values | row for variant, row in zip(variants, rows, strict=True)]
    print_line({"scenarios": lines}, args.json)


def _report(scenario: Scenario) -> Report:
    return build(scenario).run()


def _view(scenario: Scenario) -> RunView:
    collector, timeline = PageCollector(), Timeline()
    report = build(scenario).run(on_record=collector, observers=[timeline])
    return collector.view("", report, timeline.series())


def _write_page(path: Path, variants: list[Variant], views: list[RunView]) -> None:
    names = (", ".join(f"{k} {v}" for k, v in variant.values.items()) for variant in variants)
    replace = msgspec.structs.replace
    named = [replace(view, name=name) for name, view in zip(names, views, strict=True)]
    write_page(path, str(views[0].report.settings["trace"]), named)


def _print(
    variants: list[Variant], reports: list[Report], rows: list[dict[str, float | None]]
) -> None:
    """Print a row per scenario, with the ratio to the first row under each figure."""
    console = TextConsole()
    console.print(describe_costs(*(report.settings for report in reports)), soft_wrap=True)
    title = f"{reports[0].settings['trace']}, simulated; times in ms"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in variants[0].values:
        table.add_column(name)
    shown = [name for name, value in rows[0].items() if value is not None]
    for name in shown:
        table.add_column(FIGURES[name][0], justify="right", no_wrap=True)
    for variant, row in zip(variants, rows, strict=True):
        cells = (_cell(name, row[name], rows[0][name]) for name in shown)
        table.add_row(*variant.values.values(), *cells)
    console.print(table)
    refused = [len(report.refused) for report in reports]
    if any(report.ttft_growth is not None for report in reports):
        console.print(overload_sentence(reports), soft_wrap=True)
    for remark in dict.fromkeys(itertools.chain(*(report.remarks for report in reports))):
        console.print(remark, soft_wrap=True)
    if any(refused):
        console.print(f"refused, by row: {', '.join(map(str, refused))}")


def _parse(text: str, known: Mapping[str, str]) -> tuple[str, list[str]]:
    name, _, listed = text.partition("=")
    name = name.removeprefix("--")
    values = listed.split(";" if ";" in listed else ",")
    if not name or not all(values):
        raise FieldError("--sweep", f"{text!r} is not NAME=VALUES", "write gpu=L4,H100")
    if name.replace("-", "_") not in known:
        names = [flag_of(each).removeprefix("--") for each in dict.fromkeys(known.values())]
        problem = f"{name!r} is not an option of a simulation{did_you_mean(name, names)}"
        raise FieldError("--sweep", problem, f"use one of {', '.join(names)}")
    if len(set(values)) < len(values):
        raise FieldError("--sweep", f"{text!r} has a value twice", "name each once")
    return name, values


def _cell(name: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_share"):
        text = f"{value:.1%}"
    elif "_per_" in name:
        text = f"{value:,.1f}" if value >= 100 else f"{value:.3f}"
    else:
        text = f"{value * 1e3:,.2f}"
    return f"{text}\n×{value / first:.2f}" if first else text
