"""Compare the simulator with the real demo pair: `python -m bench.simulator.compare KIND`.

`engine`: an engine in this process serves the demo's prompts (greedy, half of them edits). Each
policy runs at a light load, near saturation and beyond it. `server`: the same through `cbatch
serve`, as its client sees it. `fleet`: replicas without drafts serve requests that share prefixes,
with each router. The client and the simulation use the same router objects.

A load is a share of the simulated capacity in requests per second; arrivals are a Poisson process.
The simulator gets no data of the runs that it predicts. Its inputs are

- step prices of synthetic batches, measured between the runs, since a machine's speed drifts;
- the acceptance of each prompt's drafts, from a separate run;
- for servers, the extra time of short probes before and after each run;
- for a fleet, the processor time of servers and client (`bench.simulator.host`).

`real` is the median of the repeats, and `spread` their range relative to it. `--out RUNS` stores
the measurements; `--runs RUNS` predicts them again without an engine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from sim.replay.host import Host

from bench.failures import Failures
from bench.lookahead import make_prompts
from bench.report import print_report
from bench.simulator.host import measure_host
from bench.simulator.real import (
    ACCEPTANCE_K,
    load_policy,
    probe,
    record_acceptances,
    replicas_of,
    serve_in_process,
    serve_replicas,
)
from bench.simulator.simulated import Probes, ReplayedRun, SimulatedReplicas
from bench.simulator.workloads import from_prompts, shared_prefixes
from cbatch import EngineOptions
from cbatch.core.prices.calibration import Calibration
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.prices.calibrator import Calibrator
from sim.replay.routers import ROUTERS
from sim.workload.sources import OpenLoop
from sim.workload.traces.request import TraceRequest

BOUNDS = {"tokens_per_s": 0.05, "p50": 0.07, "p99": 0.12}  # allowed relative errors
TURNS, STEPS = 4, 16  # turns to measure all batches once, and steps per batch and turn
_WARM_UP = 16  # untimed requests to each replica
_WARM_SEED = 10**4  # a seed that no run has


class Defaults(NamedTuple):
    """Default settings of a comparison."""

    policies: tuple[str, ...]
    loads: tuple[float, ...] = (0.4, 0.8, 2.0)
    routers: tuple[str, ...] = ("round-robin",)
    replicas: int = 1
    seconds: float = 5.0
    repeats: int = 3
    max_num_seqs: int = 32
    num_blocks: int | None = None  # pool of a replica; None: no prefix cache


KINDS = {
    "engine": Defaults(("off", "fixed:4", "adaptive")),
    "server": Defaults(("off", "adaptive")),
    # The pool has room for the running requests and some of the prefixes, but not for all.
    "fleet": Defaults(("off",), (0.4,), tuple(ROUTERS), 2, 60.0, 1, 16, 800),
}


class Case(msgspec.Struct):
    """A load under a policy and a router, with its runs and the probes between them."""

    policy: str
    router: str
    load: float
    requests: list[TraceRequest]
    runs: list[ReplayedRun] = []
    probes: list[Probes] = []


class Comparison(msgspec.Struct, rename={"acceptances": "fates"}):
    """All measurements of a comparison."""

    kind: str
    replicas: int
    calibration: Calibration
    acceptances: list[list[int]]
    host: Host | None
    cases: list[Case]

    def simulated_replicas(self, probes: Sequence[Probes]) -> SimulatedReplicas:
        blocks = KINDS[self.kind].num_blocks
        replicas = SimulatedReplicas(
            self.calibration, self.replicas, blocks, self.acceptances, self.host
        )
        return replicas.fitted_to(Probes.median(probes)) if probes else replicas


class TurnCalibrator:
    """Measures the prices of an engine's steps, a few batches at a time."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self._calibrator = Calibrator(engine.core.executor, engine.scheduler.config)
        self._info, self._turns = info, 0

    def turn(self) -> None:
        part = slice(self._turns % TURNS, None, TURNS)
        self._calibrator.measure(seed=self._turns, steps=STEPS, part=part)
        self._turns += 1

    def finish(self) -> Calibration:
        """Return the calibration from all batches, each measured equally often."""
        self.turn()
        while self._turns % TURNS:
            self.turn()
        return self._calibrator.calibration(self._info)


def make_cases(
    replicas: SimulatedReplicas,
    make: Callable[..., list[TraceRequest]],
    args: argparse.Namespace,
) -> list[Case]:
    """Return a case for each policy, router and load. `make` takes a rate, a count and a seed."""
    cases: list[Case] = []
    for policy in args.policy:
        capacity_per_s = replicas.capacity_per_s(policy, make)
        for router, load in itertools.product(args.router, args.load):
            rate_per_s, seed = load * capacity_per_s, 1 + len(cases)
            requests = make(rate_per_s, max(int(rate_per_s * args.seconds), 2), seed)
            cases.append(Case(policy, router, load, requests))
    return cases


def measured(args: argparse.Namespace, failures: Failures) -> Comparison:
    """Serve every case once per repeat, in alternating order. A failure ends the runs; those before
    it count."""
    kind, is_engine, is_fleet = KINDS[args.kind], args.kind == "engine", args.kind == "fleet"
    if not is_engine:
        torch.set_num_threads(1)  # as in the servers
    texts = [] if is_fleet else make_prompts("mix", demo_paths()[0])
    make = shared_prefixes if is_fleet else partial(from_prompts, texts)
    acceptances = [[0]]
    if not is_fleet:
        engine = load_policy(f"fixed:{ACCEPTANCE_K}", kind.max_num_seqs)[0]
        acceptances = record_acceptances(engine, texts)
    policy = "off" if is_fleet else EngineOptions().lookahead  # a fleet does not draft
    prices = TurnCalibrator(*load_policy(policy, kind.max_num_seqs))
    first, host = prices.finish(), None
    with contextlib.ExitStack() as stack:
        if is_engine:
            engines = {policy: load_policy(policy, kind.max_num_seqs)[0] for policy in args.policy}
            for engine in engines.values():
                serve_in_process(engine, from_prompts(texts, 1e3, 9, 0), texts)
        else:
            # Probes go to servers without drafts.
            ports = {
                policy: stack.enter_context(
                    replicas_of(policy, args.replicas, kind.max_num_seqs, kind.num_blocks)
                )
                for policy in dict.fromkeys(("off", *args.policy))
            }
            for replica_ports in ports.values():
                serve_replicas(
                    replica_ports, make(20.0, _WARM_UP * args.replicas, _WARM_SEED), texts=texts
                )
            if is_fleet:
                host = measure_host(ports["off"], first)
        replicas = SimulatedReplicas(first, args.replicas, kind.num_blocks, acceptances, host)
        comparison = Comparison(args.kind, args.replicas, first, acceptances, host, [])
        comparison.cases = make_cases(replicas, make, args)
        before = None if is_engine else probe(ports["off"], is_fleet)
        with failures.caught(args.kind):
            for repeat in range(args.repeats):
                for case in comparison.cases if repeat % 2 == 0 else reversed(comparison.cases):
                    prices.turn()
                    if before is None:
                        run = serve_in_process(engines[case.policy], case.requests, texts)
                        case.runs.append(run)
                        continue
                    run, _ = serve_replicas(ports[case.policy], case.requests, case.router, texts)
                    after = probe(ports["off"], is_fleet)
                    case.runs.append(run)
                    case.probes += [before, after]
                    before = after
    comparison.calibration = prices.finish()
    comparison.cases = [case for case in comparison.cases if case.runs]
    return comparison


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a row for each case and measure."""
    rows = []
    for case in comparison.cases:
        replicas = comparison.simulated_replicas(case.probes)
        _, run = replicas.replay(OpenLoop(case.requests), case.policy, case.router)
        repeats = [real_run.measures(comparison.replicas) for real_run in case.runs]
        for name, simulated in run.measures(comparison.replicas).items():
            real = [repeat[name] for repeat in repeats]
            median = float(np.median(real))
            error = simulated / median - 1 if median else 0.0
            bound = next((bound for key, bound in BOUNDS.items() if key in name), None)
            rows.append(
                {
                    "load": case.load,
                    "lookahead": case.policy,
                    "router": case.router,
                    "measure": name,
                    "real": round(median, 3),
                    "spread": round((max(real) - min(real)) / median, 3) if median else None,
                    "simulated": round(simulated, 3),
                    "error": round(error, 3),
                    "bound": bound,
                    "within": None if bound is None else abs(error) <= bound,
                }
            )
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m bench.simulator.compare", description=__doc__
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--policy", nargs="+", help="lookahead policies")
    parser.add_argument("--load", type=float, nargs="+", help="shares of the simulated capacity")
    parser.add_argument("--router", nargs="+", choices=ROUTERS, help="routers of a fleet")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--seconds", type=float, help="duration of the arrivals of a run")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, metavar="RUNS", help="store the measurements")
    parser.add_argument("--runs", type=Path, metavar="RUNS", help="predict stored measurements")
    args = parser.parse_args(argv)
    if args.kind == "engine" and (args.router or args.replicas):
        parser.error("--router, --replicas: an engine has none; compare a fleet")
    if args.kind == "fleet" and args.policy:
        parser.error("--policy: replicas do not draft; compare a server")
    if args.kind == "fleet" and (args.replicas or 2) < 2:
        parser.error("--replicas: a fleet has two or more; compare a server")
    kind = KINDS[args.kind]
    defaults = {"policy": kind.policies, "load": kind.loads, "router": kind.routers}
    defaults |= {"replicas": kind.replicas, "seconds": kind.seconds, "repeats": kind.repeats}
    for name, value in defaults.items():
        chosen = getattr(args, name)
        setattr(args, name, value if chosen is None else chosen)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, failures = parse(argv), Failures()
    if args.runs is None:
        comparison = measured(args, failures)
    else:
        comparison = msgspec.json.decode(args.runs.read_bytes(), type=Comparison)
        if comparison.kind != args.kind:
            raise SystemExit(
                f"--runs: {args.runs} holds runs of a {comparison.kind}; name that kind"
            )
    if args.out is not None:
        args.out.write_bytes(msgspec.json.encode(comparison))
    rows = rows_of(comparison)
    if not rows:
        failures.end()
    bounded = [row for row in rows if row["bound"] is not None]
    held_out = comparison.calibration.held_out
    notes = [
        f"{sum(row['within'] for row in bounded)} of {len(bounded)} within their bound; prices on "
        f"held-out batches: {held_out.total:+.1%} in all, {held_out.p50:.1%} of a step (p50)"
    ]
    all_probes = [probes for case in comparison.cases for probes in case.probes]
    replicas = comparison.simulated_replicas(all_probes)
    overhead, host = replicas.overhead, replicas.host
    if comparison.kind != "engine":
        notes.append(
            f"outside the engine a request takes {overhead.request_s * 1e3:.2f} ms, a step "
            f"{overhead.step_s * 1e3:.2f} ms, a row of it {overhead.row_s * 1e3:.3f} ms"
        )
    if host is not None:
        notes.append(
            f"{host.cores} processors, {host.switch_s * 1e3:.2f} ms to take one from an engine; "
            + "; ".join(
                f"{name} {work.request_s * 1e3:.2f} ms a request, {work.step_s * 1e3:.3f} a step, "
                f"{work.token_s * 1e3:.3f} a token"
                for name, work in (("servers", host.server), ("client", host.client))
            )
        )
    extra = {"held_out": held_out, "outside": overhead, "host": host}
    title = f"simulator against {comparison.kind}: demo pair, {comparison.replicas} replica(s)"
    print_report(title, rows, notes=notes, extra=msgspec.to_builtins(extra))
    failures.end()


if __name__ == "__main__":
    main()
