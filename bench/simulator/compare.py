"""Compare the simulator with the real demo pair: `python -m bench.simulator.compare`.

An engine in this process serves the demo's prompts (greedy, half of them edits). Each policy runs
at a light load, near saturation and beyond it. A load is a share of the simulated capacity in
requests per second; arrivals are a Poisson process. The simulator gets no data of the runs that it
predicts. Its inputs are

- step prices of synthetic steps, measured before and after the runs;
- the acceptance of each prompt's drafts, from a separate run.

`real` is the median of the repeats, and `spread` their range relative to it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.lookahead import make_prompts
from bench.report import Failures, print_report
from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.cli.parser import CommandParser
from cbatch.core.prices.calibration import Calibration
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import parse_lookahead
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.prices.calibrator import calibrate
from cbatch.text.outputs import Output
from sim.executor.acceptance import RecordedAcceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.report.report import Record
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import uniform
from sim.workload.sources import ClosedLoop, OpenLoop, Source
from sim.workload.traces.request import TraceRequest

BOUNDS = {"tokens_per_s": 0.05, "p50": 0.07, "p99": 0.12}  # allowed relative errors
CALIBRATION_S = 60.0  # before the runs, and after them
ACCEPTANCE_TOKENS, ACCEPTANCE_K = 72, 8  # output tokens per prompt, and drafts per step
_MAX_NUM_SEQS = 32
_OUTPUT_TOKENS = (8, 64)  # range of a request
Prompts = Sequence[Sequence[int]]


class ServedRequest(NamedTuple):
    """A request that the engine has served, with the times of `Record`."""

    arrival_s: float
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    e2e_s: float


class Case(msgspec.Struct):
    policy: str
    load: float
    requests: list[TraceRequest]
    runs: list[list[ServedRequest]] = []


def load_policy(policy: str) -> tuple[Engine, EngineInfo]:
    options = EngineOptions(
        lookahead=policy,
        max_num_seqs=_MAX_NUM_SEQS,
        enable_prefix_caching=False,
        tokenizer="none",
        seed=0,
    )
    return load_engine(*demo_paths(), options)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, seed=0, ignore_eos=True)


def acceptances_of(outputs: Sequence[Output]) -> list[int]:
    """Return, for each output token of one request, 1 if a draft of the token is accepted, else 0.
    The first token, and the bonus token of a step that accepts all drafts, have no draft and count
    as accepted."""
    acceptances: list[int] = []
    for output in outputs:
        accepted = min(output.num_accepted, len(output.token_ids))
        counts = not acceptances or 0 < output.num_drafted == output.num_accepted
        acceptances += [1] * accepted + [int(counts)] * (len(output.token_ids) - accepted)
    return acceptances


def record_acceptances(engine: Engine, texts: Prompts) -> list[list[int]]:
    """Return `acceptances_of` every prompt's output, generated greedily with `ACCEPTANCE_K` drafts
    per step. One prompt runs at a time: among others, a row also has steps without drafts, which do
    not show what would have been accepted."""
    acceptances = []
    for text in texts:
        engine.add(text, _greedy(ACCEPTANCE_TOKENS))
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
        acceptances.append(acceptances_of(outputs))
    return acceptances


def serve(engine: Engine, requests: Sequence[TraceRequest], texts: Prompts) -> list[ServedRequest]:
    """Serve the requests at their arrival times from now on, with `texts` as prompts in turn."""
    times_s: dict[int, list[float]] = {}  # by request: times of its first and its last token
    gc.collect()
    started_s, next_index = time.perf_counter(), 0
    while next_index < len(requests) or engine.has_work:
        now_s = time.perf_counter() - started_s
        while next_index < len(requests) and requests[next_index].arrival_s <= now_s:
            params = _greedy(requests[next_index].output_tokens)
            engine.add(texts[next_index % len(texts)], params, request_id=str(next_index))
            next_index += 1
        if not engine.has_work:
            time.sleep(max(requests[next_index].arrival_s - (time.perf_counter() - started_s), 0.0))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - started_s
        for output in outputs:
            times_s.setdefault(int(output.request_id), [now_s, now_s])[1] = now_s
    served = []
    for index, request in enumerate(requests):
        first_s, last_s = (at_s - request.arrival_s for at_s in times_s[index])
        tokens = request.output_tokens
        tpot_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
        served.append(ServedRequest(request.arrival_s, tokens, first_s, tpot_s, last_s))
    return served


def measures(run: Sequence[ServedRequest | Record]) -> dict[str, float]:
    end_s = max(record.arrival_s + record.e2e_s for record in run)
    duration_s = end_s - min(record.arrival_s for record in run)
    values = {"tokens_per_s": sum(record.output_tokens for record in run) / duration_s}
    for name in ("ttft", "tpot"):
        times_s = [t for record in run if (t := getattr(record, f"{name}_s")) is not None]
        for percent in (50, 99):
            values[f"{name}_p{percent}_ms"] = float(np.percentile(times_s, percent)) * 1e3
    return values


def make_cases(engine: SimulatedEngine, texts: Prompts, args: argparse.Namespace) -> list[Case]:
    """Return a case for each policy and load. The capacity is what clients get, one per slot."""
    cases: list[Case] = []
    clients = engine.calibration.engine["max_num_seqs"]
    for policy in args.policy:
        full = engine.replay(ClosedLoop(make_requests(texts, 1.0, 500, 0), clients), policy)
        capacity_per_s = len(full) / max(record.arrival_s + record.e2e_s for record in full)
        for load in args.load:
            rate_per_s = load * capacity_per_s
            count = max(int(rate_per_s * args.seconds), 2)
            requests = make_requests(texts, rate_per_s, count, 1 + len(cases))
            cases.append(Case(policy, load, requests))
    return cases


def measure(args: argparse.Namespace, failures: Failures) -> tuple[SimulatedEngine, list[Case]]:
    """Serve every case once per repeat, in alternating order. A failure ends the runs; those before
    it count."""
    texts = make_prompts("mix", demo_paths()[0])
    acceptances = record_acceptances(load_policy(f"fixed:{ACCEPTANCE_K}")[0], texts)
    priced, info = load_policy(EngineOptions().lookahead)
    parts = priced.core.executor, priced.scheduler.config, info
    calibration = calibrate(*parts, seconds=CALIBRATION_S)
    engines = {policy: load_policy(policy)[0] for policy in args.policy}
    for engine in engines.values():  # warm up
        serve(engine, make_requests(texts, 1e3, 9, 0), texts)
    cases = make_cases(SimulatedEngine(calibration, acceptances), texts, args)
    with failures.caught("engine"):
        for repeat in range(args.repeats):
            for case in cases if repeat % 2 == 0 else reversed(cases):
                case.runs.append(serve(engines[case.policy], case.requests, texts))
    simulated = SimulatedEngine(calibrate(*parts, seconds=CALIBRATION_S), acceptances)
    return simulated, [case for case in cases if case.runs]


def rows_of(engine: SimulatedEngine, cases: Sequence[Case]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        repeats = [measures(run) for run in case.runs]
        run = engine.replay(OpenLoop(case.requests), case.policy)
        for name, simulated in measures(run).items():
            real = [repeat[name] for repeat in repeats]
            median = float(np.median(real))
            error = simulated / median - 1
            bound = next(bound for key, bound in BOUNDS.items() if key in name)
            rows.append(
                {
                    "load": case.load,
                    "lookahead": case.policy,
                    "measure": name,
                    "real": round(median, 3),
                    "spread": round((max(real) - min(real)) / median, 3),
                    "simulated": round(simulated, 3),
                    "error": round(error, 3),
                    "bound": bound,
                    "within": abs(error) <= bound,
                }
            )
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m bench.simulator.compare", description=__doc__)
    parser.add_argument("--policy", nargs="+", default=["off", "fixed:4", "adaptive"])
    parser.add_argument("--load", type=float, nargs="+", default=[0.4, 0.8, 2.0])
    parser.add_argument("--seconds", type=float, default=5.0, help="arrivals of a run")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(argv)


def main() -> None:
    failures = Failures()
    engine, cases = measure(parse(), failures)
    rows = rows_of(engine, cases)
    if not rows:
        failures.end()
    held_out = engine.calibration.held_out
    note = (
        f"{sum(row['within'] for row in rows)} of {len(rows)} within their bound; prices on "
        f"held-out batches: {held_out.total:+.1%} in all, {held_out.p50:.1%} of a step (p50)"
    )
    extra = msgspec.to_builtins({"held_out": held_out})
    print_report("simulator against an engine: demo pair", rows, notes=[note], extra=extra)
    failures.end()


class SimulatedEngine(NamedTuple):
    """The calibrated engine, simulated. `acceptances` has, for each prompt, which drafts are
    accepted."""

    calibration: Calibration
    acceptances: Sequence[Sequence[int]]

    def replay(self, source: Source, policy: str) -> list[Record]:
        lookahead, engine = parse_lookahead(policy), {**self.calibration.engine}
        if lookahead.policy == "off":
            engine["draft_context_tokens"] = None
        config = SchedulerConfig(
            **engine,
            enable_prefix_caching=False,
            lookahead=lookahead,
            prompt_share=1.0,  # as in an engine that is no server
            cost_profile=self.calibration.profile,
        )
        slots, records = config.max_num_seqs, list[Record]()
        executor = FakeExecutor(
            max_num_seqs=slots,
            cost=self.calibration.prices,
            acceptance=RecordedAcceptance(self.acceptances, max_num_seqs=slots),
        )
        replay(source, config, executor, on_record=records.append)
        return records


def make_requests(texts: Prompts, rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """Return a Poisson process of requests; their prompts have the lengths of `texts` in turn."""
    lengths = uniform(*_OUTPUT_TOKENS)
    requests = generate(
        lambda rng: poisson(rate_per_s, rng), lengths, lengths, requests=count, seed=seed
    )
    return [
        msgspec.structs.replace(request, prompt_tokens=len(text))
        for request, text in zip(requests, itertools.cycle(texts), strict=False)
    ]


if __name__ == "__main__":
    main()
