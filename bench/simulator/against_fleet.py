"""`cbatch sim --replicas N --router ...` against as many real replicas: `python -m
bench.simulator.against_fleet`.

N `cbatch serve` processes of the demo pair, one thread each, lookahead off, serve requests that
share prefixes (`bench.simulator.fleet`), for `--seconds`, once behind each router. The same trace
goes through the simulated fleet, with prices of an engine of the same kind, measured alone in turns
with the runs; with what servers and client compute of a request, a step and a token, and how much
slower processors are while all are busy (`bench.simulator.host`); and with what a request and a
step spend besides, found by probes. None of these has seen the runs that are foretold. The rate is
`--load` times what the simulator says that the fleet serves by turns. The bounds are those of one
engine and one server (`bench.simulator.against_engine`).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.load.run.measure import measure, records
from bench.load.run.report import MeasuredRecord
from bench.report import print_report
from bench.server.started import started
from bench.simulator.against_engine import BOUNDS
from bench.simulator.fleet import (
    Fleet,
    Probes,
    RoutedCalls,
    probe,
    replay_real,
    shared_prefixes,
)
from bench.simulator.host import measure_host
from bench.simulator.pair import ServedRun
from bench.simulator.prices import Calibrating
from bench.simulator.server import MAX_QUEUED, ONE_THREAD
from cbatch import EngineOptions, load_engine
from cbatch.demo import demo_paths
from sim.cost.calibrated import Calibration
from sim.replay.host import Host, Work
from sim.replay.routers import ROUTERS
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.report import Record, Report
from sim.traces.request import TraceRequest
from sim.workload.sources import OpenLoop

MAX_SLOTS = 16
NUM_BLOCKS = 800  # of a replica: some of the prefixes beside what runs, not all
WARM_UP = 16  # requests to each replica
WARM_SEED = 10**4  # no run's


class RouterCase(msgspec.Struct):
    """What a router's requests came to, as their client saw it, and probes before and after; times
    are of its clock."""

    router: str
    requests: list[TraceRequest]
    report: Report
    records: list[Record]
    probes: Probes


class FleetRuns(msgspec.Struct):
    replicas: int
    num_blocks: int
    calibration: Calibration
    host: Host
    cases: list[RouterCase] = []

    def fleet(self, probes: Probes) -> Fleet:
        fleet = Fleet(self.calibration, self.num_blocks, self.replicas, self.host)
        return fleet.explaining(probes)


def case_of(
    router: str, requests: Sequence[TraceRequest], seen: RoutedCalls, probes: Probes
) -> RouterCase:
    settings = {"replicas": len(set(seen.replicas.values())), "router": router}
    found: list[Record] = [
        msgspec.structs.replace(record, replica=seen.replicas[record.index])
        for record in records([seen.run])
        if isinstance(record, MeasuredRecord)
    ]
    return RouterCase(router, list(requests), measure([seen.run], settings=settings), found, probes)


def measured(args: argparse.Namespace) -> FleetRuns:
    """Every router once, prices and probes in turns with them."""
    model, draft = demo_paths()
    torch.set_num_threads(1)  # as in the replicas
    options = EngineOptions(
        max_slots=MAX_SLOTS, prefix_cache=False, tokenizer="none", lookahead="off", seed=0
    )
    prices = Calibrating(*load_engine(model, draft, options))
    first = prices.finish()
    command = [str(model), "--draft", str(draft), "--lookahead", "off"]
    command += ["--max-slots", str(MAX_SLOTS), "--num-blocks", str(NUM_BLOCKS)]
    command += ["--max-queued-requests", str(MAX_QUEUED)]
    with contextlib.ExitStack() as stack:
        servers = (started(command, ONE_THREAD) for _ in range(args.replicas))
        ports = [stack.enter_context(server) for server in servers]
        warm_up = shared_prefixes(20.0, WARM_UP * args.replicas, WARM_SEED)
        replay_real(ports, "round-robin", warm_up)
        host = measure_host(ports, first)
        fleet = Fleet(first, NUM_BLOCKS, args.replicas, host)
        rate_per_s = args.load * fleet.capacity_per_s()
        cases, before = list[RouterCase](), probe(ports)
        for number, router in enumerate(args.router):
            count = max(int(rate_per_s * args.seconds), 2)
            requests = shared_prefixes(rate_per_s, count, seed=1 + number)
            prices.turn()
            seen, after = replay_real(ports, router, requests), probe(ports)
            cases.append(case_of(router, requests, seen, Probes.middle([before, after])))
            before = after
    calibration = prices.finish()
    return FleetRuns(args.replicas, NUM_BLOCKS, calibration, host, cases)


def rows_of(runs: FleetRuns) -> tuple[list[dict[str, Any]], list[RunView]]:
    """A row for each router and measure, real and simulated, and both for the page."""
    rows, views = [], list[RunView]()
    for case in runs.cases:
        fleet = runs.fleet(case.probes)
        report, found = fleet.simulate(case.router, OpenLoop(case.requests))
        real = measures(case.report, case.records, runs.replicas)
        for name, value in measures(report, found, runs.replicas).items():
            rows.append({"router": case.router} | row(name, real[name], value))
        views += [view(f"{case.router}: replicas", case.report, case.records)]
        views += [view(f"{case.router}: simulated", report, found)]
    return rows, views


def measures(report: Report, found: Sequence[Record], replicas: int) -> dict[str, float]:
    """Those that have a bound, and how much of the prompts was in a prefix cache, and which share
    of the requests the busiest replica got."""
    counts = [sum(record.replica == i for record in found) for i in range(replicas)]
    return ServedRun.of(report, found).measures() | {
        "prefix_hits": (report.prefix_hit_tokens or 0) / report.prompt_tokens,
        "busiest": max(counts) / len(found),
    }


def row(name: str, real: float, simulated: float) -> dict[str, Any]:
    bound = BOUNDS.get(name.rpartition("_")[2])
    is_time = name.startswith(("ttft", "tpot"))
    unit, digits = (1e3, 2) if is_time else (1.0, 1 if name == "throughput" else 3)
    error = simulated / real - 1 if real else 0.0
    return {
        "measure": f"{name}_ms" if is_time else name.replace("throughput", "tokens_per_s"),
        "replicas": round(real * unit, digits),
        "simulated": round(simulated * unit, digits),
        "ratio": round(1 + error, 3),
        "bound": bound,
        "within": None if bound is None else abs(error) <= bound,
    }


def _told(work: Work) -> str:
    return f"{work.request_s * 1e3:.2f}, {work.step_s * 1e3:.3f}, {work.token_s * 1e3:.3f}"


def view(name: str, report: Report, found: Sequence[Record]) -> RunView:
    collector = PageCollector()
    for record in found:
        collector(record)
    return collector.view(name, report)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals of each router")
    parser.add_argument("--load", type=float, default=0.4, help="of what is served at most")
    parser.add_argument("--out", type=Path, help="keep what was measured")
    parser.add_argument("--runs", type=Path, help="foretell what was kept, without replicas")
    parser.add_argument("--page", type=Path, help="draw replicas and simulation, as one HTML page")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.runs is not None:
        runs = msgspec.json.decode(args.runs.read_bytes(), type=FleetRuns)
    else:
        runs = measured(args)
    if args.out is not None:
        args.out.write_bytes(msgspec.json.encode(runs))
    rows, views = rows_of(runs)
    if args.page is not None:
        write_page(args.page, f"{runs.replicas} replicas and their simulation", views)
    bounded = [each for each in rows if each["bound"] is not None]
    held_out = runs.calibration.held_out
    fleet = runs.fleet(Probes.middle([case.probes for case in runs.cases]))
    more, host = fleet.outside, fleet.host
    assert host is not None
    rates = [len(case.requests) / case.requests[-1].arrival_s for case in runs.cases]
    print_report(
        f"simulator against {runs.replicas} replicas: demo pair",
        rows,
        notes=(
            f"{sum(each['within'] for each in bounded)} of {len(bounded)} within their bound; "
            f"prices on held-out batches: {held_out.total:+.1%} in all, {held_out.p50:.1%} of a "
            "step (p50)",
            f"{min(rates):.1f} requests/s; outside of the engine one spends "
            f"{more.request_s * 1e3:.2f} ms, a step {more.step_s * 1e3:.2f} ms, a row of it "
            f"{more.row_s * 1e3:.3f} ms",
            f"{host.cores} processors, {host.switch_s * 1e3:.2f} ms to take one from an engine; "
            f"of a request, a step and a token servers compute {_told(host.server)} ms, the client "
            f"{_told(host.client)} ms",
        ),
        extra={
            "held_out": msgspec.to_builtins(held_out),
            "outside": msgspec.to_builtins(more),
            "host": msgspec.to_builtins(host),
        },
    )


if __name__ == "__main__":
    main()
