"""The simulator against our own engine: `python -m bench.simulator_engine --cost FILE --calibrate`.

The demo pair serves its own prompts (greedy, half of them edits), arriving as a Poisson process at
three loads: light, near saturation and over it (0.4, 0.8 and 2 times what the policy serves), with
lookahead off, fixed and goodput. The same arrivals and lengths go through the simulator, whose
prices come from FILE (of made-up requests: `cbatch calibrate --out FILE`, or with `--calibrate`
measured between the runs) and whose acceptance is what each prompt's drafts came to in a run of its
own, before: neither has seen the runs that are foretold. What a repeat differs from another in is
the engine's own spread, quoted beside the error.

`--out RUNS` keeps what was measured, `--runs RUNS` foretells it again without an engine.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from bench.calibrated import Prices, add_run_options
from bench.lookahead import make_prompts
from bench.report import print_report
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.calibrating import Watched
from cbatch.core.config import SchedulerConfig
from cbatch.core.plan import StepPlan, StepResult
from cbatch.demo import demo_paths
from cbatch.stepwise import Engine
from sim.acceptance import RecordedAcceptance
from sim.arrivals import poisson
from sim.calibrated import CalibratedCost, Calibration
from sim.modelled import ModelledExecutor
from sim.replay import replay
from sim.report import Record, Report
from sim.sources import ClosedLoop, OpenLoop, Remote
from sim.traces.request import TraceRequest

POLICIES = ("off", "fixed:4", "goodput")
LOADS = {"light": 0.4, "near": 0.8, "over": 2.0}  # times what the policy serves at most
OUTPUT_TOKENS = (8, 64)
RECORD_K = 8
BOUNDS = {"throughput": 0.05, "p50": 0.07, "p99": 0.12}  # from the issue
MAX_SLOTS = 32


class Served(msgspec.Struct):
    """One run: seconds by request, TPOT of those with two tokens or more."""

    duration_s: float
    tokens: int
    ttft_s: list[float]
    tpot_s: list[float]

    @classmethod
    def of(cls, records: Sequence[Record], duration_s: float) -> Served:
        return cls(
            duration_s=duration_s,
            tokens=sum(record.output_tokens for record in records),
            ttft_s=[record.ttft_s for record in records],
            tpot_s=[record.tpot_s for record in records if record.tpot_s is not None],
        )

    def measures(self) -> dict[str, float]:
        found = {"throughput": self.tokens / self.duration_s}
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            for percent in (50, 99):
                found[f"{name}_p{percent}"] = float(np.percentile(values, percent))
        return found


class Case(msgspec.Struct):
    """A load under a policy, and how the engine served it, once a repeat."""

    policy: str
    load: str
    requests: list[TraceRequest]
    runs: list[Served]


class Runs(msgspec.Struct):
    fates: list[list[int]]  # by prompt: which drafts would be accepted, by position of the output
    cases: list[Case]
    latency_s: float = 0.0  # of a request outside of the engine


# -- the engine


class Fates(Watched):
    """An executor that notes which drafts are accepted, by request and position of its output. The
    token after a full acceptance was not drafted: nothing is known of it."""

    def __init__(self, executor: Any, max_slots: int) -> None:
        super().__init__(executor, max_slots, time.perf_counter)
        self.found: dict[str, dict[int, int]] = {}
        self._occupants: dict[int, tuple[str, int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for a in plan.deltas.admitted:
            self._occupants[a.slot] = a.request_id, a.num_prompt_tokens
        result = super().run(plan)
        for i, slot in enumerate(plan.slots.tolist()):
            name, prompt_tokens = self._occupants[slot]
            drafted, accepted = int(result.num_drafted[i]), int(result.num_accepted[i])
            emitted = int(result.row_splits[i + 1] - result.row_splits[i])
            first = int(self.num_tokens(slot)) - emitted - prompt_tokens
            fates = self.found.setdefault(name, {})
            fates |= dict.fromkeys(range(first, first + accepted), 1)
            if accepted < drafted:
                fates[first + accepted] = 0
        return result


def record_fates(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of every prompt alone, drafted at every depth: where one was accepted whole and drafted no
    more, others did. The few that nobody drafted are taken as accepted, like those before them."""
    watched = Fates(engine.loop.executor, engine.scheduler.config.max_slots)
    recorder = Engine(type(engine.scheduler)(engine.scheduler.config), watched, seed=0)
    tokens = OUTPUT_TOKENS[1] + RECORD_K
    for depth in range(RECORD_K, 0, -1):
        for i, prompt in enumerate(prompts):
            recorder.add(prompt, _greedy(tokens, max_lookahead=depth), request_id=str(i))
        while recorder.has_work:
            recorder.step()
    found = {name.partition("-")[0]: fates for name, fates in watched.found.items()}
    return [[found[str(i)].get(at, 1) for at in range(tokens)] for i in range(len(prompts))]


def serve(
    engine: Engine, requests: Sequence[TraceRequest], prompts: Sequence[Sequence[int]]
) -> Served:
    """In real time, from now on. Prompts take turns."""
    first_s, last_s = np.zeros(len(requests)), np.zeros(len(requests))
    gc.collect()
    started_s, coming = time.perf_counter(), 0
    while coming < len(requests) or engine.has_work:
        now_s = time.perf_counter() - started_s
        while coming < len(requests) and requests[coming].arrival_s <= now_s:
            params = _greedy(requests[coming].output_tokens)
            engine.add(prompts[coming % len(prompts)], params, request_id=str(coming))
            coming += 1
        if not engine.has_work:
            time.sleep(max(requests[coming].arrival_s - (time.perf_counter() - started_s), 0.0))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - started_s
        for output in outputs:
            at = int(output.request_id)
            first_s[at] = first_s[at] or now_s
            last_s[at] = now_s
    arrivals_s = np.array([request.arrival_s for request in requests])
    tokens = np.array([request.output_tokens for request in requests])
    return Served(
        duration_s=float(last_s.max() - arrivals_s[0]),
        tokens=int(tokens.sum()),
        ttft_s=(first_s - arrivals_s).tolist(),
        tpot_s=((last_s - first_s) / (tokens - 1)).tolist(),
    )


def _greedy(tokens: int, max_lookahead: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, seed=0, ignore_eos=True, max_lookahead=max_lookahead
    )


def load_policy(policy: str, max_slots: int = MAX_SLOTS) -> Engine:
    options = EngineOptions(
        lookahead=policy, max_slots=max_slots, prefix_cache=False, tokenizer="none", seed=0
    )
    return load_engine(*demo_paths(), options)[0]


# -- the simulator


def simulate(
    calibration: Calibration,
    fates: list[list[int]],
    source: Any,
    policy: str,
) -> tuple[Report, list[Record]]:
    from cbatch.assembly import parse_lookahead

    engine = {**calibration.engine}
    lookahead = parse_lookahead(policy)
    if lookahead.policy == "off":
        engine["draft_context_tokens"] = None
    config = SchedulerConfig(
        **engine, prefix_cache=False, lookahead=lookahead, cost_profile=calibration.profile
    )
    executor = ModelledExecutor(
        max_slots=config.max_slots,
        cost=CalibratedCost(calibration.prices, controlled=lookahead.policy == "goodput"),
        acceptance=RecordedAcceptance(fates, max_slots=config.max_slots),
    )
    records: list[Record] = []
    return replay(source, config, executor, on_record=records.append), records


def foretell(calibration: Calibration, runs: Runs, case: Case) -> dict[str, float]:
    source = Remote(OpenLoop(case.requests), runs.latency_s)
    report, records = simulate(calibration, runs.fates, source, case.policy)
    return Served.of(records, report.duration_s).measures()


def make_cases(
    calibration: Calibration,
    fates: list[list[int]],
    prompts: list[list[int]],
    seconds: float,
    policies: Sequence[str] = POLICIES,
) -> list[Case]:
    """Rates from what the simulator says that a policy serves; for both worlds the same."""
    rng = np.random.default_rng(0)

    def requests(rate_per_s: float, count: int) -> list[TraceRequest]:
        times_s, drawn = poisson(rate_per_s, rng), rng.integers(*OUTPUT_TOKENS, count)
        first_s = next(times_s)
        return [
            TraceRequest(
                arrival_s=(next(times_s) if i else first_s) - first_s,
                prompt_tokens=len(prompts[i % len(prompts)]),
                output_tokens=int(tokens),
            )
            for i, tokens in enumerate(drawn)
        ]

    cases = []
    for policy in policies:
        full = ClosedLoop(requests(1.0, 400), calibration.engine["max_slots"])
        capacity = simulate(calibration, fates, full, policy)[0].requests_per_s or 1.0
        for load, share in LOADS.items():
            count = max(int(share * capacity * seconds), 2)
            cases.append(Case(policy, load, requests(share * capacity, count), []))
    return cases


def rows_of(calibration: Calibration, runs: Runs) -> list[dict[str, Any]]:
    """The median of the repeats, their spread (largest less smallest, of the median), and the error
    of what was foretold."""
    rows = []
    for case in runs.cases:
        ours = foretell(calibration, runs, case)
        repeats = [run.measures() for run in case.runs]
        for name, value in ours.items():
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


def measure(prices: Prices, seconds: float, repeats: int) -> Runs:
    prompts = make_prompts("mix", demo_paths()[0])
    engines = {policy: load_policy(policy) for policy in POLICIES}
    recorder = load_policy(f"fixed:{RECORD_K}")
    runs = Runs(record_fates(recorder, prompts), [])
    runs.cases = make_cases(prices.first, runs.fates, prompts, seconds)
    for engine in engines.values():
        serve(engine, [TraceRequest(arrival_s=0.0, prompt_tokens=9, output_tokens=9)] * 9, prompts)
    for _ in range(repeats):
        for case in runs.cases:
            case.runs.append(serve(engines[case.policy], case.requests, prompts))
            prices.after_run()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of arrivals in a run")
    parser.add_argument("--repeats", type=int, default=3)
    add_run_options(parser)
    args = parser.parse_args()
    prices = Prices(args, MAX_SLOTS)
    if args.runs is not None:
        runs = msgspec.json.decode(args.runs.read_bytes(), type=Runs)
    else:
        runs = measure(prices, args.seconds, args.repeats)
    if args.out is not None:
        args.out.write_bytes(msgspec.json.encode(runs))
    calibration = prices.final()
    rows = rows_of(calibration, runs)
    held_out = calibration.held_out
    print_report(
        "simulator against the engine: demo pair",
        rows,
        notes=(
            f"{sum(row['within'] for row in rows)} of {len(rows)} within their bound; prices on "
            f"held-out batches: {held_out.total:+.1%} in all, {held_out.p50:.1%} of a step (p50)",
        ),
        extra={"held_out": msgspec.to_builtins(held_out)},
    )


if __name__ == "__main__":
    main()
