"""`cbatch bench`: how much a server takes, ours or any other of the OpenAI API."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.cli.benchwork import (
    CONCURRENCY,
    GOODPUT_SHARE,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Workload,
    parse_loads,
)
from cbatch.cli.generate import INTERRUPTED
from cbatch.cli.simulate.scenario import parse_objectives
from cbatch.cli.tracefile import add_reading_options, require_place
from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from bench.load.http import Endpoint
    from bench.load.measure import Run
    from bench.load.report import Measured
    from bench.load.runner import Load, Settings
    from bench.load.sweep import Point
    from sim.capacity import Capacity

FAILED_RUN = 1  # exit status where too many calls failed
EPILOG = """\
Latencies count from the time at which a request should have been sent. A 200 that is empty, cut or
malformed is an error. The definitions are those of cbatch sim, whose report this writes.
Without --rate or --trace it is a closed loop: as many clients as --concurrency says.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="load-test a server of the OpenAI API",
        description="Load a server of the OpenAI API and measure what its clients see.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="http://host:8000")
    _add_load(parser.add_argument_group("load"))
    _add_words(parser.add_argument_group("what is asked"))
    _add_calls(parser.add_argument_group("calls"))
    out = parser.add_argument_group("measuring")
    out.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="requests before, uncounted"
    )
    out.add_argument("--repeats", type=int, default=1, metavar="N", help="for 95 %% intervals")
    out.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=S",
        help="ttft, tpot or e2e in seconds, for goodput; repeatable",
    )
    out.add_argument(
        "--goodput-share",
        type=float,
        metavar="X",
        help=f"with --find-rate: of calls, to keep every --slo ({GOODPUT_SHARE})",
    )
    out.add_argument(
        "--max-errors", type=float, default=0.01, metavar="SHARE", help="beyond it the exit is 1"
    )
    out.add_argument("--processes", type=int, default=1, metavar="N", help="of the client")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    out.add_argument("--csv", type=Path, metavar="FILE", help="write a row of figures a load")
    out.add_argument("--records", type=Path, metavar="FILE", help="write a JSON line a call")
    out.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page of the runs")
    out.add_argument("--quiet", action="store_true", help="nothing while it runs")
    out.add_argument(
        "--self-test", action="store_true", help="no URL: what the client itself can take"
    )
    parser.set_defaults(run=run)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", metavar="N[,N...]", help=f"clients; several: a sweep ({CONCURRENCY})"
    )
    group.add_argument("--rate", metavar="R[,R...]", help="open loop: requests a second")
    group.add_argument(
        "--arrivals", metavar="LAW", help="poisson (default), constant, gamma:CV, weibull:CV, ..."
    )
    group.add_argument("--trace", metavar="FILE", help="open loop: the arrivals of a trace")
    group.add_argument("--rate-scale", type=float, metavar="X", help="the trace X times as fast")
    add_reading_options(group)
    group.add_argument("--sweep", action="store_true", help="double the load until nothing is won")
    group.add_argument(
        "--find-rate",
        action="store_true",
        help="go on from --rate to the highest at which every --slo is kept",
    )
    group.add_argument(
        "--requests", type=int, metavar="N", help="of each run (conversations with --turns)"
    )
    group.add_argument("--duration", type=float, metavar="S", help="send for so long at most")
    group.add_argument("--ramp", type=float, metavar="S", help="reach the load in so long")
    group.add_argument("--think", type=float, metavar="S", help="pause of a client")
    group.add_argument("--seed", type=int, default=0, help="of everything that is drawn")


def _add_words(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt-tokens", metavar="LAW", help=f"length ({PROMPT_TOKENS})")
    group.add_argument(
        "--output-tokens",
        metavar="LAW",
        help=f"length ({OUTPUT_TOKENS}): N, uniform:LOW:HIGH, lognormal:MEAN:CV, zipf:A:LOW:HIGH",
    )
    group.add_argument("--text", type=Path, metavar="FILE", help="what prompts are cut from")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="demo, a prompt a line, or .jsonl with fields of calls; of a --trace its arrivals and "
        "output lengths count then",
    )
    group.add_argument("--turns", metavar="LAW", help="conversations of so many turns")
    group.add_argument("--system-tokens", type=int, metavar="N", help="that they share")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction)


def _add_calls(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chat", action="store_true", help="chat instead of completions")
    group.add_argument("--no-stream", action="store_true", help="whole answers")
    group.add_argument("--model", metavar="NAME", help="default: the first the server names")
    group.add_argument("--api-key", metavar="KEY", help="also: $CBATCH_API_KEY")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument(
        "--field", action="append", default=[], metavar="NAME=JSON", help="of every call"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a call")
    group.add_argument(
        "--final-usage", action="store_true", help="do not ask for the usage of every chunk"
    )


def run(args: argparse.Namespace) -> int:
    from bench.load.processes import loop_of

    if args.self_test:
        from bench.load.selftest import self_test

        return self_test(args.processes)
    if args.url is None:
        raise FieldError("URL", "is missing", "name the server, as http://localhost:8000")
    for option in ("json", "csv", "records", "page"):
        if getattr(args, option) is not None:
            require_place(f"--{option}", getattr(args, option))
    _allow_files()
    status: int = loop_of()(_bench(args))
    return status


def _allow_files() -> None:
    """A connection is a file: as many as the system lets this process have."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _bench(args: argparse.Namespace) -> int:
    from bench.load.http import Endpoint
    from bench.load.measure import measure
    from bench.load.runner import Runner
    from bench.load.search import find_rate
    from bench.load.sweep import sweep
    from cbatch.cli.benchview import View, print_points

    objectives = parse_objectives(tuple(args.slo))
    endpoint, loads, workload = Endpoint.of(args.url), parse_loads(args), Workload(args)
    settings = await _settings(args, endpoint, workload)
    words = {"url": endpoint.url, "model": settings.bodies.model} | workload.words()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with View(shown=not args.quiet) as view:
        runner = Runner(
            settings, workload.requests, stop=stop, watch=view.update, announce=view.announce
        )

        def report(load: Load, runs: list[Run]) -> Measured:
            return measure(runs, settings=words | load.words(), objectives=objectives)

        points: list[Point]
        capacity: Capacity | None = None
        if args.find_rate:
            first, share = loads[0].value, args.goodput_share or GOODPUT_SHARE
            points, capacity = await find_rate(runner, first, share, report, begin=view.begin)
        else:
            points = await sweep(runner, loads, report, doubling=args.sweep, begin=view.begin)
    if not points:
        print("cbatch: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    _write(args, points, capacity)
    print_points(points, capacity)
    if stop.is_set():
        return INTERRUPTED
    if args.find_rate:  # that calls fail beyond the best rate is no fault
        return 0 if capacity is not None and capacity.best is not None else FAILED_RUN
    failed = sum(sum(point.report.errors.values()) for point in points)
    share = failed / max(sum(point.report.sent for point in points), 1)
    return FAILED_RUN if share > args.max_errors else 0


async def _settings(args: argparse.Namespace, endpoint: Endpoint, workload: Workload) -> Settings:
    """Asks the server for what is needed to write prompts to it."""
    from bench.load.http import HttpClient
    from bench.load.runner import Settings, find_model

    key = args.api_key or os.environ.get("CBATCH_API_KEY")
    client = HttpClient(endpoint, key=key, timeout_s=60.0)
    try:
        model = args.model or await find_model(client)
        bodies = await workload.bodies(client, model)
    finally:
        client.close()
    return Settings(
        endpoint=endpoint,
        bodies=bodies,
        key=key,
        timeout_s=args.timeout,
        processes=args.processes,
        duration_s=args.duration,
        again=args.requests is None,
        think_s=args.think or 0.0,
        ramp_s=args.ramp or 0.0,
        warmup=args.warmup,
        repeats=args.repeats,
        seed=args.seed,
    )


def _write(args: argparse.Namespace, points: list[Point], capacity: Capacity | None) -> None:
    from bench.load.measure import records
    from bench.load.sweep import to_json
    from sim.report import to_line

    if args.json is not None:
        args.json.write_bytes(to_json(points, capacity))
    if args.csv is not None:
        from bench.load.table import write_csv

        write_csv(args.csv, points)
    if args.records is not None:
        with args.records.open("wb") as file:
            for record in (r for point in points for r in records(point.runs)):
                file.write(to_line(record))
    if args.page is not None:
        from bench.load.page import write_points

        write_points(args.page, args.url, points)
