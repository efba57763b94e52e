"""`cbatch bench`: load-test a server of the OpenAI API, cbatch or any other."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from contextlib import suppress

from msgspec.structs import replace

from bench.load.cli.display import ProgressDisplay, print_points
from bench.load.cli.workload import Workload
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.files import write_csv, write_points
from bench.load.run.measure import LoadRun, measure, records
from bench.load.run.options import GOODPUT_SHARE, LoadOptions, OfferedLoad
from bench.load.run.processes import event_loop_runner
from bench.load.run.report import Measured
from bench.load.run.selftest import self_test
from bench.load.run.sweep import Point, Runner, document_of, find_model, find_rate, sweep
from cbatch.cli.output import INTERRUPTED, add_json_option, is_file_path, require_place
from cbatch.cli.settings import add_flags, read_settings
from cbatch.core.request.errors import FieldError
from sim.report.capacity import Capacity
from sim.report.report import parse_objectives, to_json, to_line

EPILOG = """\
Latencies count from the time at which a request was due. A 200 that is empty, cut or malformed is
an error. The report has the definitions of cbatch sim. Without --rate or --trace the load is a
closed loop of --concurrency clients.
"""
FAILED_RUN = 1  # exit status if too many calls failed


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s URL [options]",
        description="Load a server of the OpenAI API and measure what its clients see.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, LoadOptions, defaults={"goodput_share": GOODPUT_SHARE})
    add_json_option(parser, "the whole report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = replace(read_settings(LoadOptions, args).values, json=args.json)
    if options.self_test:
        return self_test(options.processes)
    if options.url is None:
        raise FieldError("URL", "is missing", "name the server, as http://localhost:8000")
    for option in ("json", "csv", "records", "page"):
        require_place(f"--{option}", getattr(options, option))
    with suppress(ImportError):  # Windows
        import resource

        # Every connection needs a file descriptor.
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    options = replace(options, api_key=options.api_key or os.environ.get("CBATCH_API_KEY"))
    status: int = event_loop_runner()(_bench(options))
    return status


async def _bench(options: LoadOptions) -> int:
    objectives = parse_objectives(options.slo)
    endpoint, loads = Endpoint.of(str(options.url)), options.loads
    workload = Workload(options)
    client = HttpClient(endpoint, key=options.api_key, timeout_s=options.timeout)
    try:
        bodies = await workload.bodies(client, options.model or await find_model(client))
    finally:
        client.close()
    settings = {"url": endpoint.url, "model": bodies.model, **options.reported}
    settings["temperature"] = bodies.fields["temperature"]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)

    def report(load: OfferedLoad, runs: list[LoadRun]) -> Measured:
        return measure(runs, settings=settings | load.as_settings(), objectives=objectives)

    capacity: Capacity | None = None
    with ProgressDisplay(shown=not options.quiet) as view:
        runner = Runner(options, endpoint, bodies, workload.requests, stop=stop, view=view)
        if options.find_rate:
            share = options.goodput_share or GOODPUT_SHARE
            points, capacity = await find_rate(runner, loads[0].value, share, report)
        else:
            points = await sweep(runner, loads, report, doubling=options.sweep)
    if not points:
        print("cbatch: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    print_points(points, capacity, options.json)
    _write(options, points, capacity)
    if stop.is_set():
        return INTERRUPTED
    if options.find_rate:  # failures above the best rate are expected
        return 0 if capacity is not None and capacity.best is not None else FAILED_RUN
    failed = sum(sum(point.report.errors.values()) for point in points)
    share = failed / max(sum(point.report.sent for point in points), 1)
    return FAILED_RUN if share > options.max_errors else 0


def _write(options: LoadOptions, points: list[Point], capacity: Capacity | None) -> None:
    """Write the files of --json, --csv, --records and --page. Raises `FieldError`."""
    try:
        if is_file_path(options.json):
            options.json.write_bytes(to_json(document_of(points, capacity)))
        if options.csv is not None:
            write_csv(options.csv, points)
        if options.records is not None:
            with options.records.open("wb") as file:
                for record in (r for point in points for r in records(point.runs)):
                    file.write(to_line(record))
        if options.page is not None:
            write_points(options.page, str(options.url), points)
    except OSError as error:
        raise FieldError("report", f"cannot be written ({error})", "make room for it") from error
