"""`cbatch sim`: replay a trace through the scheduler on a virtual clock."""

from __future__ import annotations

import argparse

from cbatch.cli.simulate.options import add_report_options, add_scenario_options, scenario_of
from cbatch.cli.simulate.scenario import build, refuse_ignored
from cbatch.cli.simulate.shown import Bar, Files, print_report
from cbatch.cli.tracefile import add_trace_argument


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sim",
        help="replay a trace through the scheduler on a virtual clock",
        description="The scheduler is the engine's own; what a step takes comes from a cost model.",
    )
    add_trace_argument(parser)
    add_scenario_options(parser)
    add_report_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    scenario = scenario_of(args)
    refuse_ignored(scenario)
    files = Files(args)
    simulation = build(scenario)
    with Bar() as bar, files:
        report = simulation.run(
            on_record=files.on_record, on_progress=bar.update, observers=files.observers
        )
    files.write(report)
    print_report(report)
    return 0
