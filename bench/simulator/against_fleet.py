"""`cbatch sim --replicas N --router ...` against as many real replicas: `python -m
bench.simulator.against_fleet`.

N `cbatch serve` processes of the demo pair, one thread each, lookahead off, serve requests that
share prefixes (`bench.simulator.fleet`), for `--seconds`, once behind each router. The same trace
goes through the simulated fleet, with prices that an engine of the same kind was found to have
while the other replicas served their share, in turns with the runs, and with what a request and a
step spend outside of the engine, found by short requests to idle replicas. Neither has seen the
runs that are foretold. The rate is `--load` times what the simulator says that the fleet serves by
turns. The bounds are those of one engine and one server (`bench.simulator.against_engine`).

A machine with fewer cores than replicas and what serves and sends beside them measures their
company, too, of which the simulator knows nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
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
    Outside,
    Probes,
    RoutedCalls,
    fleet_capacity_per_s,
    foretell_fleet,
    outside,
    probe,
    replay_real,
    shared_prefixes,
)
from bench.simulator.pair import ServedRun
from bench.simulator.prices import Calibrating
from bench.simulator.server import MAX_QUEUED, ONE_THREAD
from cbatch import EngineOptions, load_engine
from cbatch.demo import demo_paths
from sim.cost.calibrated import Calibration
from sim.replay.routers import ROUTERS
from sim.report.page.view import PageCollector, RunView, write_page
from sim.report.report import Record, Report
from sim.traces.request import TraceRequest

MAX_SLOTS = 16
NUM_BLOCKS = 800  # of a replica: some of the prefixes beside what runs, not all
COMPANY_S, COMPANY_HEADSTART_S = 6.0, 0.5
WARM_UP = 16  # requests to each replica
WARM_SEED = 10**4  # no run's


class RouterCase(msgspec.Struct):
    """What a router's requests came to, as their client saw it; times are of its clock."""

    router: str
    requests: list[TraceRequest]
    report: Report
    records: list[Record]


class FleetRuns(msgspec.Struct):
    replicas: int
    num_blocks: int
    calibration: Calibration
    probes: Probes
    cases: list[RouterCase] = []


def case_of(router: str, requests: Sequence[TraceRequest], seen: RoutedCalls) -> RouterCase:
    settings = {"replicas": len(set(seen.replicas.values())), "router": router}
    found: list[Record] = [
        msgspec.structs.replace(record, replica=seen.replicas[record.index])
        for record in records([seen.run])
        if isinstance(record, MeasuredRecord)
    ]
    return RouterCase(router, list(requests), measure([seen.run], settings=settings), found)


def measured(args: argparse.Namespace) -> FleetRuns:
    """Every router once, prices and probes in turns with them."""
    torch.set_num_threads(1)  # as in the replicas
    model, draft = demo_paths()
    options = EngineOptions(
        max_slots=MAX_SLOTS, prefix_cache=False, tokenizer="none", lookahead="off", seed=0
    )
    engine = load_engine(model, draft, options)
    first, found = Calibrating(*engine).finish(), list[Probes]()
    rate_per_s = args.load * fleet_capacity_per_s(first, NUM_BLOCKS, args.replicas)
    command = [str(model), "--draft", str(draft), "--lookahead", "off"]
    command += ["--max-slots", str(MAX_SLOTS), "--num-blocks", str(NUM_BLOCKS)]
    command += ["--max-queued-requests", str(MAX_QUEUED)]
    runs = FleetRuns(args.replicas, NUM_BLOCKS, first, Probes(0.0, 0.0))
    with contextlib.ExitStack() as stack:
        servers = (started(command, ONE_THREAD) for _ in range(args.replicas))
        ports = [stack.enter_context(server) for server in servers]
        warm_up = shared_prefixes(20.0, WARM_UP * args.replicas, WARM_SEED)
        replay_real(ports, "round-robin", warm_up)
        company = stack.enter_context(Company(ports[1:], rate_per_s / args.replicas))
        calibrating = Calibrating(*engine)
        for number, router in enumerate(args.router):
            found.append(probe(ports))
            count = max(int(rate_per_s * args.seconds), 2)
            requests = shared_prefixes(rate_per_s, count, seed=1 + number)
            company.beside(calibrating.turn)
            runs.cases.append(case_of(router, requests, replay_real(ports, router, requests)))
        runs.calibration = company.beside(calibrating.finish)
    runs.probes = Probes.middle(found)
    return runs


class Company:
    """The other replicas at their share of the load, while prices are measured in place of one:
    processors that share a core, and a memory, are slower when all of them have something to do.
    Requests are sent from a process of its own."""

    def __init__(self, ports: Sequence[int], rate_per_s: float) -> None:
        self._ports, self._rate_per_s = ports, rate_per_s * len(ports)
        self._times = 0

    def __enter__(self) -> Company:
        self._pool = multiprocessing.get_context("spawn").Pool(1)
        self._pool.apply(shared_prefixes, (1.0, 2, 0))  # it has imported what it needs
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def beside(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, with company for the first seconds; waits for its end."""
        if not self._ports:
            return work()
        self._times += 1
        count = max(int(self._rate_per_s * COMPANY_S), 2)
        requests = shared_prefixes(self._rate_per_s, count, WARM_SEED + self._times)
        sent = self._pool.apply_async(replay_real, (self._ports, "round-robin", requests))
        time.sleep(COMPANY_HEADSTART_S)
        done = work()
        sent.get()
        return done


def rows_of(runs: FleetRuns) -> tuple[list[dict[str, Any]], list[RunView]]:
    """A row for each router and measure, real and simulated, and both for the page."""
    rows, views, more = [], list[RunView](), outside_of(runs)
    for case in runs.cases:
        report, found = foretell_fleet(
            runs.calibration,
            runs.num_blocks,
            runs.replicas,
            case.router,
            case.requests,
            more,
        )
        real = measures(case.report, case.records, runs.replicas)
        for name, value in measures(report, found, runs.replicas).items():
            rows.append({"router": case.router} | row(name, real[name], value))
        views += [view(f"{case.router}: replicas", case.report, case.records)]
        views += [view(f"{case.router}: simulated", report, found)]
    return rows, views


def outside_of(runs: FleetRuns) -> Outside:
    return outside(runs.calibration, runs.num_blocks, runs.replicas, runs.probes)


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
    more = outside_of(runs)
    rates = [len(case.requests) / case.requests[-1].arrival_s for case in runs.cases]
    print_report(
        f"simulator against {runs.replicas} replicas: demo pair",
        rows,
        notes=(
            f"{sum(each['within'] for each in bounded)} of {len(bounded)} within their bound; "
            f"prices on held-out batches: {held_out.total:+.1%} in all, {held_out.p50:.1%} of a "
            "step (p50)",
            f"{min(rates):.1f} requests/s; outside of the engine one spends "
            f"{more.request_s * 1e3:.2f} ms, and a step {more.step_s * 1e3:.2f} ms",
        ),
        extra={"held_out": msgspec.to_builtins(held_out), "outside": msgspec.to_builtins(more)},
    )


if __name__ == "__main__":
    main()
