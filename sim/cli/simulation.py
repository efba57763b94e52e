"""Builds a `Simulation` from a `Scenario`: checks options, opens the trace, fills in defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from sim.cli.costs import PricedScenario, price_scenario
from sim.cli.scenario import ACCEPTANCE, ROUTER, SIZES, Scenario
from sim.cli.scheduler_config import as_recorded, scheduler_config, with_recorded_pool
from sim.executor.acceptance import parse_acceptance
from sim.executor.fake import FakeExecutor
from sim.replay.replay import replay
from sim.replay.replica import Progress
from sim.replay.routers import make_router
from sim.report.report import Objectives, Record, Report, parse_objectives
from sim.report.timeline import Observer
from sim.workload.arrivals import require_positive
from sim.workload.options import OpenedTrace
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source
from sim.workload.traces.changes import endless, scale
from sim.workload.traces.request import TraceRequest

# Options that change the trace or its load; the report lists them under `settings`.
_CHANGES = (
    *("skip_empty", "block_tokens", "time_unit", "spread", "requests", "rate", "rate_scale"),
    *("concurrency", "think", "latency", "price_per_hour"),
)


class Simulation(NamedTuple):
    """A checked scenario with its trace open, ready to run any number of times."""

    scenario: Scenario
    trace: OpenedTrace
    prices: PricedScenario
    config: SchedulerConfig
    objectives: Objectives | None
    settings: dict[str, Any]  # as the report lists them

    def executor(self) -> FakeExecutor:
        slots, acceptance = self.config.max_num_seqs, None
        if "acceptance" in self.settings:
            acceptance = parse_acceptance(self.settings["acceptance"], max_num_seqs=slots)
        return FakeExecutor(max_num_seqs=slots, cost=self.prices.cost, acceptance=acceptance)

    def run(
        self,
        *,
        on_record: Callable[[Record], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        observers: Sequence[Observer] = (),
        rounds: int = 1,
    ) -> Report:
        """Simulate the trace, `rounds` times in a row. `observers` need a single replica."""
        replicas = self.scenario.replicas
        report = replay(
            source_of(self.scenario, self.trace, rounds),
            self.config,
            *(self.executor() for _ in range(replicas)),
            router=make_router(self.settings["router"] or ROUTER, replicas),
            seed=self.scenario.seed,
            settings=self.settings,
            objectives=self.objectives,
            on_record=on_record,
            on_progress=on_progress,
            observers=observers,
        )
        remarks = tuple(dict.fromkeys(self.trace.remarks))
        return replace(report, remarks=remarks, tokens_per_dollar=self._per_dollar(report))

    def _per_dollar(self, report: Report) -> float | None:
        price_per_hour, rate = self.scenario.price_per_hour, report.output_tokens_per_s
        if price_per_hour is None or rate is None:
            return None
        devices = self.scenario.replicas * (self.scenario.tensor_parallel_size or 1)
        return rate * 3600 / (price_per_hour * devices)


def build(scenario: Scenario) -> Simulation:
    """Check a scenario and open its trace. Raises `FieldError` for errors that a run would meet."""
    objectives = parse_objectives(scenario.slo)
    if scenario.price_per_hour is not None:
        require_positive("price_per_hour", scenario.price_per_hour)
    trace = OpenedTrace(scenario.trace, scenario, scenario.seed)
    settings = {"trace": trace.path.name, "format": trace.format, "seed": scenario.seed}
    if scenario.pool is not None and scenario.records_pool:
        settings["pool"] = Path(scenario.pool).name
        scenario = with_recorded_pool(scenario, Path(scenario.pool))
    from_log: list[str] = []
    if trace.recorded is not None:
        scenario, from_log = as_recorded(scenario, trace.recorded)
    if scenario.rate is not None:
        scale_of = scenario.scale_of(partial(requests_of, scenario, trace))
        scenario = replace(scenario, rate_scale=scale_of)
    lookahead = parse_lookahead(scenario.lookahead)
    prices = price_scenario(scenario, lookahead.policy)
    config = scheduler_config(scenario, lookahead, prices, trace.recorded)
    settings |= prices.names
    settings |= {field: getattr(config, field) for field in (*SIZES, "enable_prefix_caching")}
    settings["lookahead"] = lookahead_name(lookahead)
    if lookahead.policy != "off":
        given = scenario.acceptance
        settings["acceptance"] = ACCEPTANCE if given is None else given
    name = scenario.router or ROUTER
    router = None if make_router(name, scenario.replicas) is None else name
    settings |= {"replicas": scenario.replicas, "router": router}
    settings |= {name: getattr(scenario, name) for name in _CHANGES}
    if from_log:
        settings["as_recorded"] = from_log
    simulation = Simulation(scenario, trace, prices, config, objectives, settings)
    simulation.executor()  # raises `FieldError` for an invalid --acceptance
    return simulation


def requests_of(scenario: Scenario, trace: OpenedTrace) -> Iterable[TraceRequest]:
    """Return the requests of the trace, or the first `scenario.requests` of them."""
    if scenario.requests is None:
        return trace.requests()
    return trace.first(scenario.requests)


def source_of(scenario: Scenario, trace: OpenedTrace, rounds: int = 1) -> Source:
    """Return the requests of the trace, `rounds` times in a row."""
    requests = requests_of(scenario, trace)
    if scenario.rate_scale is not None:
        requests = scale(requests, rate=scenario.rate_scale)
    if rounds > 1:
        whole = list(requests)
        requests = islice(endless(whole), rounds * len(whole))
    source: Source = OpenLoop(requests)
    if scenario.concurrency is not None:
        source = ClosedLoop(requests, scenario.concurrency, think_s=scenario.think or 0.0)
    return source if scenario.latency is None else Remote(source, scenario.latency)
