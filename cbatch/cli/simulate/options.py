"""The options that make up a scenario, and those of what is written about it."""

from __future__ import annotations

import argparse
from pathlib import Path

from cbatch.cli.simulate.costs import (
    BLOCK_TOKENS,
    MAX_SLOTS,
    STEP_BUDGET_TOKENS,
    add_cost_options,
)
from cbatch.cli.simulate.scenario import ACCEPTANCE, QUEUE_POLICY, ROUTER, Scenario
from cbatch.cli.tracefile import add_reading_options


def add_scenario_options(parser: argparse.ArgumentParser, *, paced: bool = True) -> None:
    """Every field of `Scenario` but the trace and the objectives, and, unless `paced`, those that
    say when requests come."""
    add_reading_options(parser.add_argument_group("reading"))
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, metavar="N", help="the first N only")
    if paced:
        load.add_argument("--rate", type=float, metavar="X", help="times as many requests a second")
        load.add_argument("--concurrency", type=int, metavar="N", help="N clients, stamps ignored")
        load.add_argument("--think", type=float, metavar="SECONDS", help="pause of such a client")
    load.add_argument(
        "--latency", type=float, metavar="SECONDS", help="of a request outside of the engine"
    )
    load.add_argument("--seed", type=int, default=0)
    add_cost_options(parser)
    engine = parser.add_argument_group(
        "engine", "Of a step log: sizes, queue and prefix cache are by default those that it names."
    )
    engine.add_argument("--lookahead", default="off", metavar="POLICY", help="off, fixed:4, ...")
    engine.add_argument(
        "--acceptance",
        metavar="MODEL",
        help="of drafts: 0.7 (the chance of each), positions:0.8,0.6 (by depth), beta:0.7,8 (mean "
        "and concentration over requests), drift:0.9,0.4,64 (high, low, tokens between changes), "
        f"recorded:FILE (JSON, 0 and 1 by request and position); default: {ACCEPTANCE}",
    )
    engine.add_argument("--max-slots", type=int, help=f"default: {MAX_SLOTS}")
    engine.add_argument(
        "--step-budget",
        type=int,
        help=f"tokens of a step, at most (default: {STEP_BUDGET_TOKENS})",
    )
    engine.add_argument(
        "--block-size", type=int, help=f"tokens of a KV block (default: {BLOCK_TOKENS})"
    )
    engine.add_argument("--num-blocks", type=int, help="KV blocks (default: what the device holds)")
    engine.add_argument("--max-model-tokens", type=int, help="context (default: the model's)")
    engine.add_argument(
        "--queue-policy",
        choices=["fcfs", "priority", "shortest"],
        help=f"default: {QUEUE_POLICY}",
    )
    cache = engine.add_mutually_exclusive_group()
    cache.add_argument("--no-prefix-cache", action="store_true", default=None)
    cache.add_argument("--prefix-cache", action="store_false", default=None, dest="no_prefix_cache")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=int, default=1, metavar="N", help="engines, all the same")
    fleet.add_argument(
        "--router",
        metavar="NAME",
        help=f"round-robin, least-loaded, prefix-affine (default: {ROUTER})",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("report")
    add_slo_option(out)
    add_json_option(out)
    out.add_argument("--records", type=Path, metavar="FILE", help="write a JSON line a request")
    out.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page of plots")
    out.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace of the steps")


def add_slo_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=S",
        help="ttft, tpot or e2e in seconds, for goodput; repeatable",
    )


def add_json_option(group: argparse._ActionsContainer) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Options have the names of the fields."""
    values = {name: getattr(args, name) for name in Scenario.__struct_fields__}
    return Scenario(**values | {"slo": tuple(args.slo)})
