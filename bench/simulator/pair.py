"""The demo pair under a trace, in real time and in the simulator.

What is foretold was not seen: prices are of made-up requests (`bench.simulator.prices`), acceptance
is what prompts' drafts came to in runs of their own, before.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from cbatch import EngineOptions, SamplingParams, load_engine
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.demo import demo_paths
from cbatch.engine.engine import Engine
from cbatch.engine.options import parse_lookahead
from cbatch.engine.step_meter import StepMeter
from sim.cost.calibrated import CalibratedCost, Calibration
from sim.distributions.arrivals import poisson
from sim.distributions.lengths import uniform
from sim.executor.acceptance import RecordedAcceptance
from sim.executor.modelled import ModelledExecutor
from sim.replay.replay import replay
from sim.report.report import Record, Report
from sim.traces.request import TraceRequest
from sim.workload.generate import generate
from sim.workload.sources import ClosedLoop, OpenLoop, Remote

OUTPUT_TOKENS = (8, 64)
RECORD_K = 8
# Short requests to a server that has been idle, as it mostly is at a light load.
PROBES, PROBE_TOKENS, PROBES_PER_S = 48, 16, 20.0


class ServedRun(msgspec.Struct):
    """One run: seconds by request, TPOT of those with two tokens or more."""

    duration_s: float
    tokens: int
    ttft_s: list[float]
    tpot_s: list[float]

    @classmethod
    def of(cls, run: Report | float, records: Sequence[Record]) -> ServedRun:
        """`run` is its report, or how long it took."""
        return cls(
            duration_s=run.duration_s if isinstance(run, Report) else run,
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


class LoadCase(msgspec.Struct):
    """A load under a policy, and how the engine served it, once a repeat."""

    policy: str
    load: str
    requests: list[TraceRequest]
    runs: list[ServedRun] = []


class EngineRuns(msgspec.Struct):
    fates: list[list[int]]  # by prompt: which drafts would be accepted, by position of the output
    cases: list[LoadCase]
    probe_ttft_s: float | None = None  # of short requests to an idle server; None: there was none


# -- the engine


class Fates(StepMeter):
    """An executor that notes which drafts are accepted, by request and position of its output. The
    token after a full acceptance was not drafted: nothing is known of it."""

    def __init__(self, executor: Any, max_slots: int) -> None:
        super().__init__(executor, max_slots)
        self.found: dict[str, dict[int, int]] = {}
        self._occupants: dict[int, tuple[str, int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for a in plan.deltas.new_sequences:
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
) -> ServedRun:
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
    return ServedRun(
        duration_s=float(last_s.max() - arrivals_s[0]),
        tokens=int(tokens.sum()),
        ttft_s=(first_s - arrivals_s).tolist(),
        tpot_s=((last_s - first_s) / (tokens - 1)).tolist(),
    )


def _greedy(tokens: int, max_lookahead: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, seed=0, ignore_eos=True, max_lookahead=max_lookahead
    )


def load_policy(policy: str, max_slots: int) -> Engine:
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


def latency_of(calibration: Calibration, probe_ttft_s: float | None) -> float:
    """What a request spends outside of the engine: of a probe's time to its first token what the
    simulator does not explain."""
    if probe_ttft_s is None:
        return 0.0
    probes = [
        TraceRequest(arrival_s=i / PROBES_PER_S, prompt_tokens=PROBE_TOKENS, output_tokens=1)
        for i in range(PROBES)
    ]
    _, records = simulate(calibration, [[0]], OpenLoop(probes), "off")
    return max(probe_ttft_s - statistics.median(record.ttft_s for record in records), 0.0)


def foretell(
    calibration: Calibration, runs: EngineRuns, case: LoadCase
) -> tuple[Report, list[Record]]:
    latency_s = latency_of(calibration, runs.probe_ttft_s)
    source = Remote(OpenLoop(case.requests), latency_s)
    return simulate(calibration, runs.fates, source, case.policy)


def make_requests(
    prompts: Sequence[Sequence[int]], rate_per_s: float, count: int, seed: int = 0
) -> list[TraceRequest]:
    """Of these prompts in turn, a Poisson process."""
    lengths = uniform(*OUTPUT_TOKENS)
    made = generate(
        lambda rng: poisson(rate_per_s, rng), lengths, lengths, requests=count, seed=seed
    )
    return [
        msgspec.structs.replace(request, prompt_tokens=len(prompts[i % len(prompts)]))
        for i, request in enumerate(made)
    ]


def capacity_per_s(
    calibration: Calibration,
    fates: list[list[int]],
    prompts: Sequence[Sequence[int]],
    policy: str,
) -> float:
    """Requests that a policy serves at most, as the simulator says."""
    full = ClosedLoop(make_requests(prompts, 1.0, 400), calibration.engine["max_slots"])
    return simulate(calibration, fates, full, policy)[0].requests_per_s or 1.0
