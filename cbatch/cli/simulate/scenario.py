"""One simulation as a value: it can be compared, changed, and run in another process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cbatch.cli.simulate.costs import (
    BLOCK_TOKENS,
    MAX_SLOTS,
    STEP_BUDGET_TOKENS,
    Priced,
    first_of,
    ignored_beside,
    priced,
)
from cbatch.cli.simulate.recorded import as_recorded, rules
from cbatch.cli.tracefile import OpenedTrace
from cbatch.core.config import LookaheadConfig, SchedulerConfig
from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from sim.costs import CostModel
    from sim.modelled import ModelledExecutor
    from sim.replay import Progress
    from sim.report import Objectives, Record, Report
    from sim.sources import Source
    from sim.timeline import Observer

ACCEPTANCE = "0.7"
ROUTER, QUEUE_POLICY = "round-robin", "fcfs"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What the options of the same names say; None: left to a default that depends on others."""

    trace: str
    format: str | None
    skip_empty: bool
    spread: float | None
    requests: int | None
    rate: float | None
    concurrency: int | None
    think: float | None
    latency: float | None
    seed: int
    gpu: str | None
    model: str | None
    tp: int | None
    draft_model: str | None
    step_seconds: float | None
    cost: str | None
    cost_table: str | None
    lookahead: str
    acceptance: str | None
    max_slots: int | None
    step_budget: int | None
    block_size: int | None
    num_blocks: int | None
    max_model_tokens: int | None
    queue_policy: str | None
    no_prefix_cache: bool | None
    replicas: int
    router: str | None
    slo: tuple[str, ...]

    def ignored(self) -> dict[str, str]:
        """Options that the others leave without effect, and why."""
        open_loop, off = self.concurrency is None, self.lookahead == "off"
        unused = (
            ("think", open_loop, "there are no clients: give --concurrency"),
            ("rate", not open_loop, "--concurrency ignores the stamps"),
            ("spread", not open_loop, "--concurrency ignores the stamps"),
            ("acceptance", off, "nobody drafts: give --lookahead"),
            ("draft_model", off, "nobody drafts: give --lookahead"),
            *ignored_beside(self),
            ("router", self.replicas == 1, "there is one replica: give --replicas"),
        )
        return {
            f"--{name.replace('_', '-')}": why
            for name, ignored, why in unused
            if ignored and getattr(self, name) is not None
        }


def refuse_ignored(*scenarios: Scenario) -> None:
    """Raises `FieldError` for an option that none of them makes use of."""
    first, *others = (scenario.ignored() for scenario in scenarios)
    for option, why in first.items():
        if all(option in other for other in others):
            raise FieldError(option, f"would be ignored, since {why}", "leave one of them out")


class Simulation(NamedTuple):
    """A scenario that was checked, with its trace open."""

    scenario: Scenario
    trace: OpenedTrace
    cost: CostModel
    config: SchedulerConfig
    objectives: Objectives | None
    settings: dict[str, Any]  # of the report

    def source(self) -> Source:
        from sim.sources import ClosedLoop, OpenLoop, Remote
        from sim.traces.changes import sample, scale

        scenario, requests = self.scenario, self.trace.requests()
        if scenario.requests is not None:
            requests = sample(requests, most=scenario.requests)
        if scenario.rate is not None:
            requests = scale(requests, rate=scenario.rate)
        source: Source = OpenLoop(requests)
        if scenario.concurrency is not None:
            source = ClosedLoop(requests, scenario.concurrency, think_s=scenario.think or 0.0)
        return source if scenario.latency is None else Remote(source, scenario.latency)

    def executor(self) -> ModelledExecutor:
        from sim.acceptance import parse_acceptance
        from sim.modelled import ModelledExecutor

        slots, acceptance = self.config.max_slots, None
        if "acceptance" in self.settings:
            acceptance = parse_acceptance(self.settings["acceptance"], max_slots=slots)
        return ModelledExecutor(max_slots=slots, cost=self.cost, acceptance=acceptance)

    def run(
        self,
        *,
        on_record: Callable[[Record], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        observers: Sequence[Observer] = (),
    ) -> Report:
        """`observers` are for one replica alone."""
        from sim.fleet import replay_fleet
        from sim.replay import replay
        from sim.routers import make_router

        more: dict[str, Any] = {
            "seed": self.scenario.seed,
            "settings": self.settings,
            "objectives": self.objectives,
            "on_record": on_record,
            "on_progress": on_progress,
        }
        if self.scenario.replicas == 1:
            more["observers"] = observers
            return replay(self.source(), self.config, self.executor(), **more)
        executors = [self.executor() for _ in range(self.scenario.replicas)]
        router = make_router(self.settings["router"])
        return replay_fleet(self.source(), self.config, executors, router, **more)


def build(scenario: Scenario) -> Simulation:
    """Raises `FieldError` for whatever can be found wrong before it runs."""
    objectives = parse_objectives(scenario.slo)
    trace = OpenedTrace(scenario, scenario.seed)
    taken: dict[str, Any] = {}
    if trace.recorded is not None:
        scenario, taken = as_recorded(scenario, trace.recorded)
    cost, config, words = _engine(scenario, trace.recorded)
    if config.lookahead.policy != "off":
        words["acceptance"] = first_of(ACCEPTANCE, scenario.acceptance)
    words |= _fleet(scenario)
    changes = ("skip_empty", "spread", "requests", "rate", "concurrency", "think", "latency")
    settings = {"trace": trace.path.name, "format": trace.format, "seed": scenario.seed}
    settings |= words | {name: getattr(scenario, name) for name in changes}
    if taken:
        settings["as_recorded"] = sorted(taken)
    simulation = Simulation(scenario, trace, cost, config, objectives, settings)
    simulation.executor()  # raises for an acceptance that is no model
    return simulation


def parse_objectives(texts: tuple[str, ...]) -> Objectives | None:
    from sim.report import Objectives

    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            given[f"{name}_s"] = seconds = float(value)
        except ValueError:
            seconds = math.nan
        if name not in ("ttft", "tpot", "e2e") or not 0 < seconds < math.inf:
            raise FieldError(
                "--slo", f"{text!r} is not known", "write ttft=0.5, tpot=... or e2e=..."
            )
    return Objectives(**given) if given else None


# -- inside


def _engine(
    scenario: Scenario, recorded: SchedulerConfig | None
) -> tuple[CostModel, SchedulerConfig, dict[str, Any]]:
    """The cost model, the scheduler's configuration, and both in words for the report."""
    from cbatch.assembly import lookahead_name, parse_lookahead

    lookahead = parse_lookahead(scenario.lookahead)
    prices = priced(scenario, lookahead)
    scheduler = _scheduler(scenario, lookahead, prices, rules(scenario, recorded))
    words = prices.names | _words(scheduler) | {"lookahead": lookahead_name(lookahead)}
    return prices.cost, scheduler, words


def _fleet(scenario: Scenario) -> dict[str, Any]:
    from sim.routers import make_router

    count, router = scenario.replicas, scenario.router
    if count < 1:
        raise FieldError("--replicas", f"{count} is not allowed", "use at least 1")
    if count > 1:
        router = router or ROUTER
        make_router(router)
    return {"replicas": count, "router": router}


def _scheduler(
    scenario: Scenario, lookahead: LookaheadConfig, prices: Priced, more: dict[str, Any]
) -> SchedulerConfig:
    """Sizes as given, else the cost model's, else the usual ones; `more` are other fields."""
    num_blocks = first_of(prices.num_blocks, scenario.num_blocks)
    context_tokens = first_of(prices.max_model_tokens, scenario.max_model_tokens)
    if num_blocks is None or context_tokens is None:
        field = "--num-blocks" if num_blocks is None else "--max-model-tokens"
        raise FieldError(field, "is not known from this cost of a step", "give it")
    max_slots = first_of(MAX_SLOTS, scenario.max_slots, prices.max_slots)
    budget_tokens = first_of(STEP_BUDGET_TOKENS, scenario.step_budget, prices.step_budget_tokens)
    prices.check(max_slots=max_slots, step_budget_tokens=budget_tokens)
    drafts = lookahead.policy != "off"
    draft_tokens = first_of(context_tokens, prices.draft_context_tokens)
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=first_of(BLOCK_TOKENS, scenario.block_size, prices.block_size_tokens),
        max_slots=max_slots,
        max_model_tokens=context_tokens,
        step_budget_tokens=budget_tokens,
        # The parser's own choices, or a configuration's.
        queue_policy=scenario.queue_policy or QUEUE_POLICY,  # type: ignore[arg-type]
        prefix_cache=not scenario.no_prefix_cache,
        draft_context_tokens=draft_tokens if drafts else None,
        catch_up_price=first_of(1.0, prices.catch_up_price) if drafts else 1.0,
        lookahead=lookahead,
        cost_profile=prices.profile if drafts else None,
        **more,
    )


def _words(config: SchedulerConfig) -> dict[str, Any]:
    fields = (
        "num_blocks",
        "block_size_tokens",
        "max_slots",
        "max_model_tokens",
        "step_budget_tokens",
        "queue_policy",
        "prefix_cache",
    )
    return {field: getattr(config, field) for field in fields}
