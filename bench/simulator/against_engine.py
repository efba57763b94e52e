"""The simulator against our own engine: `python -m bench.simulator.against_engine --cost FILE
--calibrate`; with `--server` against the demo server, as its clients see it.

The demo pair serves its own prompts (greedy, half of them edits), arriving as a Poisson process at
three loads: light, near saturation and over it (0.4, 0.8 and 2 times what the policy serves). The
same arrivals and lengths go through the simulator, whose prices come from FILE (of made-up
requests: `cbatch calibrate --out FILE`, or with `--calibrate` measured between the runs) and whose
acceptance is what each prompt's drafts came to in a run of its own, before: neither has seen the
runs that are foretold. Of a server there is what a request spends outside of the engine, too: the
time to first token of short requests to an idle one, less what the simulator says of these.

What a repeat differs from another in is the engine's own `spread`, quoted beside the error. `--out
RUNS` keeps what was measured, `--runs RUNS` foretells it again without an engine.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.lookahead import make_prompts
from bench.report import print_report
from bench.simulator.pair import (
    EngineRuns,
    LoadCase,
    ServedRun,
    capacity_per_s,
    foretell,
    latency_of,
    load_policy,
    make_requests,
    record_fates,
    serve,
)
from bench.simulator.prices import MeasuredPrices
from bench.simulator.server import served_by_server
from cbatch.demo import demo_paths
from sim.cost.calibrated import Calibration
from sim.report.report import to_json, to_line

POLICIES = {False: ("off", "fixed:4", "goodput"), True: ("off", "goodput")}  # by `--server`
LOADS = {"light": 0.4, "near": 0.8, "over": 2.0}  # times what the policy serves at most
BOUNDS = {"throughput": 0.05, "p50": 0.07, "p99": 0.12}
MAX_SLOTS = 32
ServeCase = Callable[[EngineRuns, LoadCase], ServedRun]


def make_cases(
    calibration: Calibration,
    fates: list[list[int]],
    prompts: list[list[int]],
    seconds: float,
    policies: Sequence[str],
) -> list[LoadCase]:
    """Rates from what the simulator says that a policy serves; for both worlds the same."""
    cases: list[LoadCase] = []
    for policy in policies:
        capacity = capacity_per_s(calibration, fates, prompts, policy)
        for load, share in LOADS.items():
            rate_per_s, seed = share * capacity, len(cases)
            count = max(int(rate_per_s * seconds), 2)
            cases.append(LoadCase(policy, load, make_requests(prompts, rate_per_s, count, seed)))
    return cases


def rows_of(calibration: Calibration, runs: EngineRuns) -> list[dict[str, Any]]:
    """The median of the repeats, their spread (largest less smallest, of the median), and the error
    of what was foretold."""
    rows = []
    for case in runs.cases:
        repeats = [run.measures() for run in case.runs]
        for name, value in ServedRun.of(*foretell(calibration, runs, case)).measures().items():
            real = [repeat[name] for repeat in repeats]
            median = float(np.median(real))
            bound = BOUNDS[name.rpartition("_")[2]]
            unit = 1.0 if name == "throughput" else 1e3
            rows.append(
                {
                    "load": case.load,
                    "lookahead": case.policy,
                    "measure": "tokens_per_s" if name == "throughput" else f"{name}_ms",
                    "engine": round(median * unit, 2),
                    "spread": round((max(real) - min(real)) / median, 3),
                    "simulated": round(value * unit, 2),
                    "error": round(value / median - 1, 3),
                    "bound": bound,
                    "within": abs(value / median - 1) <= bound,
                }
            )
    return rows


def measure(args: argparse.Namespace, prices: MeasuredPrices, folder: Path) -> EngineRuns:
    """Every case once a repeat, in an order that turns round; what there is then is kept in `--out`
    after each."""
    prompts = make_prompts("mix", demo_paths()[0])
    fates = record_fates(load_policy("fixed:8", MAX_SLOTS), prompts)
    policies = args.policy or POLICIES[args.server]
    runs = EngineRuns(fates, make_cases(prices.first, fates, prompts, args.seconds, policies))
    with contextlib.ExitStack() as stack:
        if args.server:
            serve_case = stack.enter_context(served_by_server(folder, prompts, policies, MAX_SLOTS))
        else:
            serve_case = served_here(prompts, policies)
        for repeat in range(args.repeats):
            for case in runs.cases if repeat % 2 == 0 else reversed(runs.cases):
                case.runs.append(serve_case(runs, case))
                prices.after_run()
            if args.out is not None:
                args.out.write_bytes(msgspec.json.encode(runs))
    return runs


def served_here(prompts: list[list[int]], policies: Sequence[str]) -> ServeCase:
    """By engines of this process, warm."""
    engines = {policy: load_policy(policy, MAX_SLOTS) for policy in policies}
    for engine in engines.values():
        serve(engine, make_requests(prompts, 1e3, 9), prompts)
    return lambda runs, case: serve(engines[case.policy], case.requests, prompts)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="store_true", help="as clients of `cbatch serve` see it")
    parser.add_argument("--policy", nargs="+", help="in place of the usual ones")
    parser.add_argument("--seconds", type=float, default=5.0, help="of arrivals in a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cost", type=Path, required=True, help="of cbatch calibrate")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure prices between the runs, for --cost"
    )
    parser.add_argument("--out", type=Path, help="keep what was measured")
    parser.add_argument("--runs", type=Path, help="foretell what was kept, without an engine")
    parser.add_argument(
        "--folder", type=Path, help="keep reports and records, for `cbatch report page`"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.server and args.runs is None:
        torch.set_num_threads(1)  # as in the servers: what serves HTTP has a core for itself
    with tempfile.TemporaryDirectory() as unnamed:
        folder = args.folder or Path(unnamed)
        folder.mkdir(parents=True, exist_ok=True)
        prices = MeasuredPrices(args, MAX_SLOTS)
        if args.runs is not None:
            runs = msgspec.json.decode(args.runs.read_bytes(), type=EngineRuns)
        else:
            runs = measure(args, prices, folder)
        calibration = prices.final()
        for case in runs.cases:
            report, records = foretell(calibration, runs, case)
            path = folder / f"simulated-{case.policy}-{case.load}"
            path.with_suffix(".json").write_bytes(to_json(report))
            path.with_suffix(".jsonl").write_bytes(b"".join(map(to_line, records)))
    rows = rows_of(calibration, runs)
    held_out, latency_s = calibration.held_out, latency_of(calibration, runs.probe_ttft_s)
    print_report(
        f"simulator against the {'server' if args.server else 'engine'}: demo pair",
        rows,
        notes=(
            f"{sum(row['within'] for row in rows)} of {len(rows)} within their bound; prices on "
            f"held-out batches: {held_out.total:+.1%} in all, {held_out.p50:.1%} of a step (p50)",
            f"outside of the engine a request spends {latency_s * 1e3:.2f} ms",
        ),
        extra={"held_out": msgspec.to_builtins(held_out), "latency_s": latency_s},
    )


if __name__ == "__main__":
    main()
