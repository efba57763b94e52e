"""What a policy gains, engine and simulator side by side: `python -m bench.simulator_policies`.

The demo pair serves one trace (heads of functions that it was not trained on, and as many edits of
such functions, greedy; Poisson arrivals at `--load` times what it serves without drafts) under each
policy; they take turns in an order that turns round. The same trace goes through the simulator,
which has not seen any of it. Its prices come from `--cost FILE`, of made-up requests: with
`--calibrate` they are measured between the runs, else before by `cbatch calibrate --max-slots 8
--rounds 4 --out FILE`, whose slots are those of the engine. Its acceptance comes from runs of other
functions than those that are served, so that a request meets the fate of some prompt of its kind,
not its own.

A difference is in points: 100 (b / a - 1) of tokens a second or of the mean time per output token.
On the engine it is the median over repeats, each comparing what ran within it; `spread` is from the
least of them to the largest, and `clear` whether they are all of one sign. `--out RUNS` keeps what
was measured, after every repeat, and `--runs RUNS` foretells it again without an engine.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.calibrated import Prices, add_run_options
from bench.report import print_report
from bench.simulator_engine import (
    OUTPUT_TOKENS,
    RECORD_K,
    Served,
    load_policy,
    record_fates,
    serve,
    simulate,
)
from cbatch.demo import demo_paths
from cbatch.demo.data import Document, find_files, is_held_out, module_name, read_source
from cbatch.demo.prompts import edit_of, function_heads, whole_functions
from cbatch.text import load_tokenizer
from sim.arrivals import poisson
from sim.calibrated import Calibration
from sim.lengths import uniform
from sim.sources import ClosedLoop, OpenLoop
from sim.traces.request import TraceRequest
from sim.workload import generate

POLICIES = ("off", "fixed:2", "fixed:6", "goodput")
MOST_PROMPT_TOKENS = 256
WARM_UP = 16  # requests
MAX_SLOTS = 8
BOUND_POINTS = 5.0  # from the issue
MEASURES = ("throughput", "tpot_mean")


class Runs(msgspec.Struct):
    """`served` by policy, once a repeat; `fates` are of prompts that were not served."""

    fates: list[list[int]]
    requests: list[TraceRequest]
    served: dict[str, list[Served]]


def make_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Two sets without a function in common: of each function its head, then the edit. They are
    those of the held-out modules in the running interpreter's library; neighbours, which are alike,
    go to different sets."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = load_tokenizer(demo_paths()[0])
    pairs: dict[str, tuple[str, str]] = {}
    for path in find_files(root):
        module = module_name(path, root)
        if is_held_out(module) and not module.startswith("test"):
            document = Document(module, read_source(path) or "", is_test=False)
            heads = list(function_heads(document))
            for name, source in whole_functions(document):
                head = next(head for head in heads if source.startswith(head))
                pairs[source] = head, edit_of(name, source)
    encoded = [
        [list(tokenizer.encode(text))[-MOST_PROMPT_TOKENS:] for text in pair]
        for pair in pairs.values()
    ]
    one, other = (list(itertools.chain(*encoded[first::2])) for first in (0, 1))
    return one, other


def make_trace(
    calibration: Calibration, prompts: Sequence[Sequence[int]], count: int, load: float
) -> list[TraceRequest]:
    """Its rate comes from what the simulator says is served without drafts."""
    lengths = uniform(*OUTPUT_TOKENS)

    def requests(rate_per_s: float) -> list[TraceRequest]:
        made = generate(
            lambda rng: poisson(rate_per_s, rng), lengths, lengths, requests=count, seed=0
        )
        return [
            msgspec.structs.replace(request, prompt_tokens=len(prompts[i % len(prompts)]))
            for i, request in enumerate(made)
        ]

    full = ClosedLoop(requests(1.0), calibration.engine["max_slots"])
    report, _ = simulate(calibration, [[0]], full, "off")
    return requests(load * (report.requests_per_s or 1.0))


def prepare(
    calibration: Calibration, policies: Sequence[str], count: int, load: float
) -> tuple[Runs, list[list[int]]]:
    """What is measured yet to come, and the prompts that will be served."""
    served, others = make_prompts()
    recorder = load_policy(f"fixed:{RECORD_K}", calibration.engine["max_slots"])
    fates = record_fates(recorder, others)
    trace = make_trace(calibration, served, count, load)
    return Runs(fates, trace, {policy: [] for policy in policies}), served


def measure(prices: Prices, runs: Runs, prompts: list[list[int]], repeats: int) -> Iterator[Runs]:
    """After each repeat what there is."""
    engines = {p: load_policy(p, prices.first.engine["max_slots"]) for p in runs.served}
    for engine in engines.values():
        serve(engine, runs.requests[:WARM_UP], prompts)
    for repeat in range(repeats):
        for policy in runs.served if repeat % 2 == 0 else reversed(runs.served):
            runs.served[policy].append(serve(engines[policy], runs.requests, prompts))
            prices.after_run()
        yield runs


def foretell(calibration: Calibration, runs: Runs) -> dict[str, Served]:
    found = {}
    for policy in runs.served:
        source = OpenLoop(runs.requests)
        report, records = simulate(calibration, runs.fates, source, policy)
        found[policy] = Served.of(records, report.duration_s)
    return found


def measures(served: Served) -> dict[str, float]:
    return {
        "throughput": served.tokens / served.duration_s,
        "tpot_mean": float(np.mean(served.tpot_s)),
    }


def rows_of(calibration: Calibration, runs: Runs) -> list[dict[str, Any]]:
    """A row for every two policies and measure: what the second changes, in points."""
    ours = {policy: measures(served) for policy, served in foretell(calibration, runs).items()}
    real = {policy: [measures(one) for one in many] for policy, many in runs.served.items()}
    rows = []
    for (a, b), name in itertools.product(itertools.combinations(runs.served, 2), MEASURES):
        repeats = [
            100 * (with_b[name] / with_a[name] - 1)
            for with_a, with_b in zip(real[a], real[b], strict=True)
        ]
        engine = float(np.median(repeats))
        simulated = 100 * (ours[b][name] / ours[a][name] - 1)
        rows.append(
            {
                "policy": b,
                "over": a,
                "measure": name,
                "engine_points": round(engine, 1),
                "spread": round(max(repeats) - min(repeats), 1),
                "simulated_points": round(simulated, 1),
                "clear": min(repeats) * max(repeats) > 0,
                "apart": round(abs(simulated - engine), 1),
                "same_sign": simulated * engine > 0,
                "within": simulated * engine > 0 and abs(simulated - engine) <= BOUND_POINTS,
            }
        )
    return rows


def absolute(calibration: Calibration, runs: Runs) -> list[str]:
    """What the points are of."""
    ours = {policy: measures(served) for policy, served in foretell(calibration, runs).items()}
    lines = []
    for policy, many in runs.served.items():
        found = [measures(one) for one in many]
        speed, tpot_s = (float(np.median([m[name] for m in found])) for name in MEASURES)
        lines.append(
            f"{policy}: engine {speed:,.0f} tokens/s, TPOT {tpot_s * 1e3:.2f} ms; simulated "
            f"{ours[policy]['throughput']:,.0f} and {ours[policy]['tpot_mean'] * 1e3:.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=104, help="of the trace")
    parser.add_argument("--load", type=float, default=2.0, help="times what is served without")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    add_run_options(parser)
    args = parser.parse_args()
    prices = Prices(args, MAX_SLOTS)
    if args.runs is not None:
        runs = msgspec.json.decode(args.runs.read_bytes(), type=Runs)
    else:
        runs, prompts = prepare(prices.first, args.policy, args.requests, args.load)
        for done in measure(prices, runs, prompts, args.repeats):
            if args.out is not None:
                args.out.write_bytes(msgspec.json.encode(done))
    calibration = prices.final()
    rows = rows_of(calibration, runs)
    repeats = min(map(len, runs.served.values()))
    print_report(
        f"what a policy changes, in points: demo pair, {len(runs.requests)} requests",
        rows,
        notes=(
            *absolute(calibration, runs),
            f"{sum(row['within'] for row in rows)} of {len(rows)} of the same sign and within "
            f"{BOUND_POINTS:g} points; {repeats} repeats",
        ),
    )


if __name__ == "__main__":
    main()
