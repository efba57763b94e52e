"""`cbatch sim capacity`: the highest rate at which a trace is served within an SLO."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cbatch.cli.output import add_json_option, names_file, print_line
from sim.cli.options import (
    add_comparison_options,
    add_slo_option,
    refuse_processes_without_sweep,
)
from sim.cli.scenario import Scenario, add_flags
from sim.cli.trace_options import add_trace_argument

if TYPE_CHECKING:
    from sim.cli.display import Bar
    from sim.cli.sweep import Variant
    from sim.replay.capacity import Capacity, ServiceLevel, Tried
    from sim.report.report import Record

COMMAND = "sim capacity"
PERCENTILE = 99.0
RATES = (1 / 64, 64.0)
PACE = ("rate", "concurrency", "think")  # when requests come: the search says


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        COMMAND,
        usage="%(prog)s TRACE [options]",
        description="Serves the trace at rates found by doubling and bisection, to 2 %.",
    )
    add_trace_argument(parser)
    level = parser.add_argument_group("service level")
    add_slo_option(level)
    level.add_argument(
        "--percentile",
        type=float,
        metavar="P",
        help=f"of each time with an --slo (default: {PERCENTILE:.0f}, or none with a share)",
    )
    level.add_argument(
        "--goodput-share", type=float, metavar="X", help="of requests that meet every --slo"
    )
    level.add_argument(
        "--rates",
        type=_range,
        default=RATES,
        metavar="LOWEST:HIGHEST",
        help="times the trace's rate (default: 1/64 to 64)",
    )
    add_flags(parser, Scenario, but=PACE)
    add_comparison_options(parser)
    add_json_option(parser, "the whole report")
    parser.set_defaults(run=run, **dict.fromkeys(PACE))


def run(args: argparse.Namespace) -> int:
    from sim.cli.display import Bar, prices_of
    from sim.cli.processes import num_processes, run_scenarios
    from sim.cli.sweep import variants

    refuse_processes_without_sweep(args)
    level = _level(args)
    found = variants(args, fixed=PACE)
    scenarios = [variant.scenario for variant in found]
    if args.sweep:
        work = partial(search, level=level, rates=args.rates)
        processes = num_processes(args.processes, len(scenarios))
        capacities = run_scenarios(work, scenarios, processes)
    else:
        with Bar() as bar:
            capacities = [search(scenarios[0], level, args.rates, bar)]
    documents = [_document(*each, level) for each in zip(found, capacities, strict=True)]
    if names_file(args.json):
        text = msgspec.json.format(msgspec.json.encode(documents), indent=2)
        args.json.write_bytes(text + b"\n")
    print(prices_of(*(document["settings"] for document in documents)))
    for variant, capacity in zip(found, capacities, strict=True):
        _print(variant, capacity)
    print_line({"scenarios": documents}, args.json)
    return 0


def search(
    scenario: Scenario, level: ServiceLevel, rates: tuple[float, float], bar: Bar | None = None
) -> Capacity:
    from sim.cli.simulation import build
    from sim.replay.capacity import find_capacity, judge, try_rate

    def serve(rate: float, rounds: int) -> Tried:
        records: list[Record] = []
        simulation = build(msgspec.structs.replace(scenario, rate=rate))
        if bar is not None:
            bar.prefix = f"{rate:.3g} × the rate · "
        report = simulation.run(
            on_record=records.append,
            on_progress=None if bar is None else bar.update,
            rounds=rounds,
        )
        return judge(rate, report, records, level, rounds)

    return find_capacity(
        lambda rate: try_rate(partial(serve, rate)), lowest=rates[0], highest=rates[1]
    )


# -- inside


def _range(text: str) -> tuple[float, float]:
    lowest, _, highest = text.partition(":")
    try:
        return float(lowest), float(highest)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write LOWEST:HIGHEST") from error


def _level(args: argparse.Namespace) -> ServiceLevel:
    from sim.replay.capacity import ServiceLevel
    from sim.report.report import Objectives, parse_objectives

    percentile, share = args.percentile, args.goodput_share
    return ServiceLevel(
        objectives=parse_objectives(tuple(args.slo)) or Objectives(),
        percentile=PERCENTILE if percentile is None and share is None else percentile,
        goodput_share=share,
    )


def _document(variant: Variant, capacity: Capacity, level: ServiceLevel) -> dict[str, Any]:
    from sim.cli.simulation import build

    settings = dict(build(variant.scenario).settings)
    del settings["rate"]
    found: dict[str, Any] = msgspec.to_builtins(capacity)
    return {"settings": settings, "level": msgspec.to_builtins(level)} | found


def _print(variant: Variant, capacity: Capacity) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from sim.cli.display import wide_console

    console = wide_console()
    swept = ", ".join(f"{name} {value}" for name, value in variant.values.items())
    table = Table(title=swept or None, title_justify="left", box=SIMPLE)
    for name in ("× the rate", "arrivals/s", "tokens/s", "TTFT ms", "TPOT ms", "E2E ms", "goodput"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in sorted(capacity.tried, key=lambda one: one.rate):
        table.add_row(
            f"{one.rate:.4g}",
            f"{one.arrivals_per_s:,.3f}",
            _number(one.output_tokens_per_s, 1.0, ",.1f"),
            *(_number(seconds, 1e3, ",.2f") for seconds in (one.ttft_s, one.tpot_s, one.e2e_s)),
            _number(one.goodput_share, 1.0, ".1%"),
            "meets" if one.meets else "fails",
        )
    console.print(table)
    console.print(_verdict(capacity), soft_wrap=True)


def _verdict(capacity: Capacity) -> str:
    best = capacity.best
    if best is None:
        return f"even {capacity.tried[-1].rate:.4g} times the rate fails: go lower with --rates"
    rate = f"{best.rate:.4g} times the rate, {best.arrivals_per_s:,.3f} arrivals/s"
    if best.rounds > 1:
        rate += f" (the trace is short: it was served {best.rounds} times in a row)"
    if best.too_short:
        rate += "; it is too short to tell a burst from a load: give a longer one"
    if capacity.ends == "highest meets":
        return f"capacity: at least {rate}, the highest that was tried: go higher with --rates"
    return f"capacity: {rate}"


def _number(value: float | None, times: float, form: str) -> str:
    return "-" if value is None else format(value * times, form)
