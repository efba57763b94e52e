"""`cbatch sim`: replay a trace through the engine's scheduler on a virtual clock."""

from __future__ import annotations

import argparse

from cbatch.cli.settings import add_flags
from cbatch.core.request.errors import FieldError
from sim.cli.display import ReportFiles, add_report_options, print_report, replay_bar
from sim.cli.processes import counting_bar
from sim.cli.scenario import ENGINE_DEFAULTS, Scenario
from sim.cli.simulation import build
from sim.cli.sweep import (
    add_comparison_options,
    compare,
    refuse_processes_without_sweep,
    variants,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sim",
        usage="%(prog)s TRACE [options]",
        description="Replay a trace through the engine's own scheduler, with a cost model for the "
        "duration of a step. A step log also sets the defaults of sizes, queue and prefix cache.",
    )
    add_flags(parser, Scenario, defaults=ENGINE_DEFAULTS)
    add_comparison_options(parser)
    add_report_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    files = ReportFiles(args)
    for option, given in (("--records", args.records), ("--perfetto", args.perfetto)):
        if args.sweep and given is not None:
            raise FieldError(option, "would be ignored with --sweep", "leave one of them out")
    refuse_processes_without_sweep(args)
    runs = variants(args)
    for option, given in (("--page", args.page), ("--perfetto", args.perfetto)):
        if given is not None and any(variant.scenario.replicas > 1 for variant in runs):
            raise FieldError(option, "shows one engine", "leave out --replicas")
    if args.sweep:
        compare(args, runs)
        return 0
    simulation = build(runs[0].scenario)
    with counting_bar() as bar, files:
        report = simulation.run(
            on_record=files.on_record, on_progress=replay_bar(bar), observers=files.observers
        )
    files.write(report)
    print_report(report, args.json)
    return 0
