"""`cbatch sim capacity`: find the highest arrival rate at which a trace meets an SLO."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Annotated, Any

import msgspec
from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Table

from cbatch.cli.console import TextConsole
from cbatch.cli.output import add_json_option, is_file_path, print_line
from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import knob
from sim.cli.display import describe_costs, replay_bar
from sim.cli.processes import counting_bar, num_processes, run_scenarios
from sim.cli.scenario import ENGINE_DEFAULTS, Scenario
from sim.cli.simulation import build
from sim.cli.sweep import (
    Variant,
    add_comparison_options,
    refuse_processes_without_sweep,
    variants,
)
from sim.report.capacity import Capacity, ServiceLevel, Trial, find_capacity, judge, try_rate
from sim.report.report import Objectives, Record, parse_objectives, to_json
from sim.workload.options import SHARE_KNOB

COMMAND = "sim capacity"
PERCENTILE = 99.0  # default of --percentile, unless --goodput-share is given
_knob = partial(knob, "service level")
# Options of a simulation that this command lacks, since the search chooses the rate.
PACE = ("rate", "rate_scale", "concurrency", "think")


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """The SLO, and the range of rates to search."""

    percentile: Annotated[
        float | None,
        _knob(
            "percentile of a latency that must meet its --slo",
            "P",
            default="99, or none with a share",
        ),
    ] = None
    goodput_share: Annotated[float | None, SHARE_KNOB] = None
    rate_scales: Annotated[
        str,
        _knob("range of factors on the trace's own rate", "LOWEST:HIGHEST"),
    ] = "1/64:64"

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and highest factor on the trace's rate. Raises `FieldError`."""
        fractions = [part.partition("/") for part in self.rate_scales.split(":")]
        try:
            lowest, highest = (float(above) / float(below or 1) for above, _, below in fractions)
        except (ValueError, ZeroDivisionError) as error:
            problem = f"{self.rate_scales!r} is not allowed"
            raise FieldError("rate_scales", problem, "write LOWEST:HIGHEST") from error
        return lowest, highest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        COMMAND,
        usage="%(prog)s TRACE [options]",
        description="Find the highest rate that meets all objectives, to within 2 %.",
    )
    add_flags(parser, Search)
    add_flags(parser, Scenario, exclude=PACE, defaults=ENGINE_DEFAULTS)
    add_comparison_options(parser)
    add_json_option(parser, "the whole report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(Search, args)
    with settings.naming():
        return _run(args, settings.values)


def _run(args: argparse.Namespace, options: Search) -> int:
    refuse_processes_without_sweep(args)
    runs = variants(args, fixed=PACE)
    scenarios = [variant.scenario for variant in runs]
    level = _service_level(options, scenarios[0].slo)
    if args.sweep:
        work = partial(search, level=level, rates=options.range)
        processes = num_processes(args.processes, len(scenarios))
        capacities = run_scenarios(work, scenarios, processes)
    else:
        with counting_bar() as bar:
            capacities = [search(scenarios[0], level, options.range, bar)]
    documents = [
        _document(variant, capacity, level)
        for variant, capacity in zip(runs, capacities, strict=True)
    ]
    if is_file_path(args.json):
        args.json.write_bytes(to_json(documents))
    print(describe_costs(*(document["settings"] for document in documents)))
    for variant, capacity in zip(runs, capacities, strict=True):
        _print(variant, capacity)
    print_line({"scenarios": documents}, args.json)
    return 0


def search(
    scenario: Scenario, level: ServiceLevel, rates: tuple[float, float], bar: Progress | None = None
) -> Capacity:
    """Find the highest rate in the range `rates` that meets `level`. Rates are multiples of the
    trace's own rate."""

    def serve(rate: float, rounds: int) -> Trial:
        records: list[Record] = []
        simulation = build(msgspec.structs.replace(scenario, rate_scale=rate))
        show = None if bar is None else replay_bar(bar, f"{rate:.3g} × the rate · ")
        report = simulation.run(on_record=records.append, on_progress=show, rounds=rounds)
        return judge(rate, report, records, level, rounds)

    return find_capacity(
        lambda rate: try_rate(partial(serve, rate)), lowest=rates[0], highest=rates[1]
    )


def _service_level(options: Search, slo: tuple[str, ...]) -> ServiceLevel:
    percentile, share = options.percentile, options.goodput_share
    return ServiceLevel(
        objectives=parse_objectives(slo) or Objectives(),
        percentile=PERCENTILE if percentile is None and share is None else percentile,
        goodput_share=share,
    )


def _document(variant: Variant, capacity: Capacity, level: ServiceLevel) -> dict[str, Any]:
    settings = dict(build(variant.scenario).settings)
    del settings["rate"], settings["rate_scale"]
    outcome: dict[str, Any] = msgspec.to_builtins(capacity)
    return {"settings": settings, "level": msgspec.to_builtins(level)} | outcome


def _print(variant: Variant, capacity: Capacity) -> None:
    console = TextConsole()
    swept = ", ".join(f"{name} {value}" for name, value in variant.values.items())
    table = Table(title=swept or None, title_justify="left", box=SIMPLE)
    for name in ("× the rate", "arrivals/s", "tokens/s", "TTFT ms", "TPOT ms", "E2E ms", "goodput"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for trial in sorted(capacity.tried, key=lambda trial: trial.rate):
        table.add_row(
            f"{trial.rate:.4g}",
            f"{trial.arrivals_per_s:,.3f}",
            _number(trial.output_tokens_per_s, 1.0, ",.1f"),
            *(
                _number(seconds, 1e3, ",.2f")
                for seconds in (trial.ttft_s, trial.tpot_s, trial.e2e_s)
            ),
            _number(trial.goodput_share, 1.0, ".1%"),
            "meets" if trial.meets else "fails",
        )
    console.print(table)
    console.print(_conclusion(capacity), soft_wrap=True)


def _conclusion(capacity: Capacity) -> str:
    best = capacity.best
    if best is None:
        lowest = f"even {capacity.tried[-1].rate:.4g} times the rate"
        return f"{lowest} misses the objectives: lower --rate-scales"
    rate = f"{best.rate:.4g} times the rate, {best.arrivals_per_s:,.3f} arrivals/s"
    if best.rounds > 1:
        rate += f" (the trace is short, so it was replayed {best.rounds} times in a row)"
    if best.too_short:
        rate += (
            "; the trace is too short to distinguish a burst from a steady load: use a longer one"
        )
    if capacity.ends == "highest meets":
        return f"capacity: at least {rate}, the highest that was tried: raise --rate-scales"
    return f"capacity: {rate}"


def _number(value: float | None, factor: float, spec: str) -> str:
    return "-" if value is None else format(value * factor, spec)
