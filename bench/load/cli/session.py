"""Execution of `cbatch bench`: runs the loads that its options name, then reports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from bench.load.cli.display import ProgressDisplay, print_points
from bench.load.cli.options import GOODPUT_SHARE, LoadOptions
from bench.load.cli.workload_options import Workload, parse_loads
from bench.load.client.http import Endpoint, HttpClient
from bench.load.run.files import write_csv, write_points
from bench.load.run.measure import LoadRun, measure, records
from bench.load.run.processes import event_loop_runner
from bench.load.run.refusals import drop_rejected_fields
from bench.load.run.report import Measured
from bench.load.run.runner import LoadSettings, OfferedLoad, Runner, find_model
from bench.load.run.sweep import Point, document_of, find_rate, sweep
from cbatch.cli.output import INTERRUPTED, is_file_path
from cbatch.core.request.errors import FieldError
from sim.report.capacity import Capacity
from sim.report.report import parse_objectives, to_json, to_line

FAILED_RUN = 1  # exit status if too many calls failed


def bench(options: LoadOptions) -> int:
    status: int = event_loop_runner()(_bench(options))
    return status


async def _bench(options: LoadOptions) -> int:
    objectives = parse_objectives(options.slo)
    endpoint, loads, workload = (
        Endpoint.of(str(options.url)),
        parse_loads(options),
        Workload(options),
    )
    settings, refused = await _settings(options, endpoint, workload)
    report_settings: dict[str, Any] = {"url": endpoint.url, "model": settings.bodies.model}
    report_settings |= workload.report_settings()
    report_settings |= {
        "temperature": settings.bodies.fields["temperature"],
        "left_out": list(refused),
    }
    for name, reason in refused.items():
        print(f"cbatch: left out, since the server rejects it: {name}: {reason}", file=sys.stderr)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with ProgressDisplay(shown=not options.quiet) as view:
        runner = Runner(
            settings, workload.requests, stop=stop, watch=view.update, announce=view.announce
        )

        def report(load: OfferedLoad, runs: list[LoadRun]) -> Measured:
            return measure(
                runs, settings=report_settings | load.as_settings(), objectives=objectives
            )

        points: list[Point]
        capacity: Capacity | None = None
        if options.find_rate:
            first, share = loads[0].value, options.goodput_share or GOODPUT_SHARE
            points, capacity = await find_rate(runner, first, share, report, begin=view.begin)
        else:
            points = await sweep(runner, loads, report, doubling=options.sweep, begin=view.begin)
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


async def _settings(
    options: LoadOptions, endpoint: Endpoint, workload: Workload
) -> tuple[LoadSettings, dict[str, str]]:
    """Find the server's model, the token ids of the corpus and the fields that the server rejects.
    Returns the settings of all runs, and the reason for each rejected field."""
    key = options.api_key or os.environ.get("CBATCH_API_KEY")
    client = HttpClient(endpoint, key=key, timeout_s=options.timeout)
    try:
        model = options.model or await find_model(client)
        bodies = await workload.bodies(client, model)
        bodies, refused = await drop_rejected_fields(client, bodies, workload.user_fields)
    finally:
        client.close()
    settings = LoadSettings(
        endpoint=endpoint,
        bodies=bodies,
        key=key,
        timeout_s=options.timeout,
        processes=options.processes,
        duration_s=options.duration,
        cycle=options.requests is None,
        think_s=options.think or 0.0,
        ramp_s=options.ramp or 0.0,
        warmup=options.warmup,
        repeats=options.repeats,
        seed=options.seed,
    )
    return settings, refused


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
