"""`cbatch sim`: replay a trace through the scheduler on a virtual clock."""

from __future__ import annotations

import argparse
import json

from cbatch.cli.simulate.options import add_report_options, add_scenario_options
from cbatch.cli.simulate.processes import add_processes_option, num_processes, run_scenarios
from cbatch.cli.simulate.scenario import build
from cbatch.cli.simulate.shown import Bar, Files, print_report
from cbatch.cli.simulate.sweep import (
    Variant,
    add_sweep_option,
    figures,
    print_comparison,
    run_variant,
    variants,
    view_variant,
    write_comparison,
)
from cbatch.cli.tracefile import add_trace_argument
from cbatch.core.errors import FieldError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sim",
        help="replay a trace through the scheduler on a virtual clock",
        description="The scheduler is the engine's own; what a step takes comes from a cost model.",
    )
    add_trace_argument(parser)
    add_scenario_options(parser)
    compared = parser.add_argument_group("comparison")
    add_sweep_option(compared)
    add_processes_option(compared)
    add_report_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    files = Files(args)
    for option, given in (("--records", args.records), ("--perfetto", args.perfetto)):
        if args.sweep and given is not None:
            raise FieldError(option, "would be ignored with --sweep", "leave one of them out")
    if not args.sweep and args.processes is not None:
        raise FieldError("--processes", "would be ignored without --sweep", "leave it out")
    found = variants(args)
    for option, given in (("--page", args.page), ("--perfetto", args.perfetto)):
        if given is not None and any(variant.scenario.replicas > 1 for variant in found):
            raise FieldError(option, "shows one engine", "leave out --replicas")
    return _compare(args, found) if args.sweep else _run_one(args, files, found[0])


# -- inside


def _run_one(args: argparse.Namespace, files: Files, variant: Variant) -> int:
    simulation = build(variant.scenario)
    with Bar() as bar, files:
        report = simulation.run(
            on_record=files.on_record, on_progress=bar.update, observers=files.observers
        )
    files.write(report)
    print_report(report)
    return 0


def _compare(args: argparse.Namespace, found: list[Variant]) -> int:
    import msgspec

    scenarios = [variant.scenario for variant in found]
    processes = num_processes(args.processes, len(scenarios))
    if args.page is None:
        reports = run_scenarios(run_variant, scenarios, processes)
    else:
        views = run_scenarios(view_variant, scenarios, processes)
        reports = [view.report for view in views]
        write_comparison(args.page, found, views)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=2) + b"\n")
    print_comparison(found, reports)
    rows = [v.values | figures(report) for v, report in zip(found, reports, strict=True)]
    print(json.dumps({"scenarios": rows}), flush=True)
    return 0
