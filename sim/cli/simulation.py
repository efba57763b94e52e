"""Builds a `Simulation` from a `Scenario`: checks options, opens the trace, fills in defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.core.speculation.config import LookaheadConfig
from sim.cli.costs import PricedScenario, price_scenario
from sim.cli.scenario import ACCEPTANCE, ENGINE_DEFAULTS, ROUTER, SIZES, Scenario
from sim.cost.base import CostModel
from sim.cost.recorded_pool import recorded_blocks
from sim.executor.acceptance import parse_acceptance
from sim.executor.modelled import ModelledExecutor
from sim.replay.host import Host, read_host
from sim.replay.replay import replay
from sim.replay.replica import Progress
from sim.replay.routers import make_router
from sim.report.report import Objectives, Record, Report, parse_objectives
from sim.report.timeline import Observer
from sim.workload.options import OpenedTrace
from sim.workload.sources import ClosedLoop, OpenLoop, Remote, Source
from sim.workload.traces.changes import endless, sample, scale
from sim.workload.traces.request import TraceRequest

# Options that change the trace or its load; the report lists them under `settings`.
_CHANGES = (
    *("skip_empty", "block_tokens", "time_unit", "spread", "requests", "rate", "rate_scale"),
    *("concurrency", "think", "latency"),
)


def refuse_ignored(*scenarios: Scenario) -> None:
    """Raise `FieldError` for an option that all `scenarios` ignore."""
    first, *others = (scenario.ignored() for scenario in scenarios)
    for option, why in first.items():
        if all(option in other for other in others):
            raise FieldError(option, f"would be ignored, since {why}", "leave one of them out")


class Simulation(NamedTuple):
    """A checked scenario with its trace open, ready to run any number of times."""

    scenario: Scenario
    trace: OpenedTrace
    cost: CostModel
    config: SchedulerConfig
    objectives: Objectives | None
    settings: dict[str, Any]  # as the report lists them
    host: Host | None = None

    def source(self, rounds: int = 1) -> Source:
        """Return the requests of the trace, `rounds` times in a row."""
        scenario, requests = self.scenario, _requests(self.scenario, self.trace)
        if scenario.rate_scale is not None:
            requests = scale(requests, rate=scenario.rate_scale)
        if rounds > 1:
            whole = list(requests)
            requests = islice(endless(whole), rounds * len(whole))
        source: Source = OpenLoop(requests)
        if scenario.concurrency is not None:
            source = ClosedLoop(requests, scenario.concurrency, think_s=scenario.think or 0.0)
        return source if scenario.latency is None else Remote(source, scenario.latency)

    def executor(self) -> ModelledExecutor:
        slots, acceptance = self.config.max_num_seqs, None
        if "acceptance" in self.settings:
            acceptance = parse_acceptance(self.settings["acceptance"], max_num_seqs=slots)
        return ModelledExecutor(max_num_seqs=slots, cost=self.cost, acceptance=acceptance)

    def run(
        self,
        *,
        on_record: Callable[[Record], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        observers: Sequence[Observer] = (),
        rounds: int = 1,
    ) -> Report:
        """Simulate the trace, `rounds` times in a row. `observers` need a single replica."""
        replicas, router = self.scenario.replicas, self.settings["router"]
        return replay(
            self.source(rounds),
            self.config,
            *(self.executor() for _ in range(replicas)),
            router=make_router(router) if replicas > 1 else None,
            seed=self.scenario.seed,
            settings=self.settings,
            objectives=self.objectives,
            on_record=on_record,
            on_progress=on_progress,
            observers=observers,
            host=self.host,
        )


def build(scenario: Scenario) -> Simulation:
    """Check a scenario and open its trace. Raises `FieldError` for errors that a run would meet."""
    objectives = parse_objectives(scenario.slo)
    trace = OpenedTrace(scenario.trace, scenario, scenario.seed)
    settings = {"trace": trace.path.name, "format": trace.format, "seed": scenario.seed}
    if scenario.pool is not None and scenario.records_pool:
        settings["pool"] = Path(scenario.pool).name
        scenario = _with_recorded_pool(scenario, Path(scenario.pool))
    from_log: list[str] = []
    if trace.recorded is not None:
        if scenario.has_device and scenario.gpu is None and scenario.cost_table is None:
            remedy = "calibrate the machine that recorded it, or name a device with --gpu"
            raise FieldError("--cost", "is missing: a step log has no prices", remedy)
        scenario, from_log = _as_recorded(scenario, trace.recorded)
    if scenario.rate is not None:
        scale_of = scenario.scale_of(partial(_requests, scenario, trace))
        scenario = replace(scenario, rate_scale=scale_of)
    lookahead = parse_lookahead(scenario.lookahead)
    prices = price_scenario(scenario, lookahead.policy)
    config = _scheduler(scenario, lookahead, prices, trace.recorded)
    settings |= prices.names
    settings |= {field: getattr(config, field) for field in (*SIZES, "enable_prefix_caching")}
    settings["lookahead"] = lookahead_name(lookahead)
    if lookahead.policy != "off":
        given = scenario.acceptance
        settings["acceptance"] = ACCEPTANCE if given is None else given
    settings |= {"replicas": scenario.replicas, "router": _router(scenario)}
    settings |= {name: getattr(scenario, name) for name in _CHANGES}
    if from_log:
        settings["as_recorded"] = from_log
    host = None if scenario.host is None else read_host(scenario.host)
    if host is not None:
        settings["host"] = msgspec.to_builtins(host)
    simulation = Simulation(scenario, trace, prices.cost, config, objectives, settings, host)
    simulation.executor()  # raises `FieldError` for an invalid --acceptance
    return simulation


# -- inside


def _requests(scenario: Scenario, trace: OpenedTrace) -> Iterable[TraceRequest]:
    if scenario.requests is None:
        return trace.requests()
    return sample(trace.requests(), max_requests=scenario.requests)


def _as_recorded(scenario: Scenario, config: SchedulerConfig) -> tuple[Scenario, list[str]]:
    """Set options that are not given to the values in `config`, the configuration in a step log.
    Return the scenario and the names of these options.

    A log never sets lookahead or prices. It sets the number of KV blocks only if the device's
    memory size is unknown; otherwise the number is computed."""
    recorded = {field: getattr(config, field) for field in (*SIZES, "enable_prefix_caching")}
    if scenario.has_device:
        del recorded["num_blocks"]
    filled = {name: value for name, value in recorded.items() if getattr(scenario, name) is None}
    return replace(scenario, **filled), sorted(filled)


def _with_recorded_pool(scenario: Scenario, path: Path) -> Scenario:
    blocks, block_tokens = recorded_blocks(path, scenario.block_size)
    return replace(scenario, num_blocks=blocks, block_size=block_tokens, pool=None)


def _router(scenario: Scenario) -> str | None:
    count, router = scenario.replicas, scenario.router
    if count < 1:
        raise FieldError("--replicas", f"{count} is not allowed", "use at least 1")
    if count > 1:
        router = router or ROUTER
        make_router(router)
    return router


def _scheduler(
    scenario: Scenario,
    lookahead: LookaheadConfig,
    prices: PricedScenario,
    recorded: SchedulerConfig | None,
) -> SchedulerConfig:
    """Return the scheduler's configuration. A size comes from its option, else from the cost model,
    else from `ENGINE_DEFAULTS`, limited to the largest measured value. Settings without an option
    come from `recorded`, the configuration in a step log. Raises `FieldError`."""
    given = {field: v for field in SIZES if (v := getattr(scenario, field)) is not None}
    fields: dict[str, Any] = ENGINE_DEFAULTS | prices.engine
    limits = {field: limit for field, limit in prices.limits.items() if limit is not None}
    for field, limit in limits.items():
        if field not in prices.engine:
            fields[field] = min(fields[field], limit)
    fields |= given
    for field in ("num_blocks", "max_model_len"):
        if field not in fields:
            raise FieldError(field, "is not known from this cost of a step", "give it")
    for field, limit in limits.items():
        if fields[field] > limit:
            raise FieldError(field, f"{fields[field]} is more than was measured", f"use <= {limit}")
    draft_context_tokens = fields.get("draft_context_tokens") or fields["max_model_len"]
    fields["draft_context_tokens"] = draft_context_tokens
    if lookahead.policy == "off":
        fields |= {"draft_context_tokens": None, "catch_up_price": 1.0, "cost_profile": None}
    if recorded is not None:
        fields["decode_reserve_tokens"] = recorded.decode_reserve_tokens
        if fields["queue_policy"] == recorded.queue_policy:
            fields["ageing_per_s"] = recorded.ageing_per_s
    enable_prefix_caching = scenario.enable_prefix_caching is not False
    return SchedulerConfig(
        **fields, enable_prefix_caching=enable_prefix_caching, lookahead=lookahead
    )
