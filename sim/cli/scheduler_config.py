"""The scheduler's configuration of a `Scenario`: options, then a recorded log, then defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cbatch.cli.settings import flag_of
from cbatch.core.prices.chunk_sizes import PROMPT_SHARE
from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.config import LookaheadConfig
from sim.cli.costs import PricedScenario
from sim.cli.scenario import ENGINE_DEFAULTS, SIZES, STATES, Scenario
from sim.cost.pool import recorded_blocks
from sim.workload.options import warn


def as_recorded(scenario: Scenario, config: SchedulerConfig) -> tuple[Scenario, list[str]]:
    """Set options that are not given to the values in `config`, the configuration in a step log.
    Return the scenario and the names of these options.

    A log never sets lookahead or prices. It sets the number of KV blocks only if the device's
    memory size is unknown; otherwise the number is computed. Raises `FieldError` without prices."""
    if scenario.has_device and scenario.gpu is None:
        remedy = "calibrate the machine that recorded it, or name a device with --gpu"
        raise FieldError("--cost", "is missing: a step log has no prices", remedy)
    recorded = {field: getattr(config, field) for field in (*SIZES, "enable_prefix_caching")}
    if scenario.has_device:
        del recorded["num_blocks"]
    if not config.num_state_pages:
        recorded = {field: value for field, value in recorded.items() if field not in STATES}
    filled = {name: value for name, value in recorded.items() if getattr(scenario, name) is None}
    return replace(scenario, **filled), sorted(filled)


def with_recorded_pool(scenario: Scenario, path: Path) -> Scenario:
    """Set the number and the size of KV blocks to those that the recording at `path` needs."""
    blocks, block_tokens = recorded_blocks(path, scenario.block_size)
    return replace(scenario, num_blocks=blocks, block_size=block_tokens, pool=None)


def scheduler_config(
    scenario: Scenario,
    lookahead: LookaheadConfig,
    prices: PricedScenario,
    recorded: SchedulerConfig | None,
) -> SchedulerConfig:
    """Return the scheduler's configuration. A size comes from its option, else from the cost model,
    else from `ENGINE_DEFAULTS`, limited to the largest measured value. Settings without an option
    come from `recorded`, the configuration in a step log. Raises `FieldError`."""
    given = {field: v for field in SIZES if (v := getattr(scenario, field)) is not None}
    share = 1.0 if scenario.pool is not None else PROMPT_SHARE  # vLLM fills its steps
    fields: dict[str, Any] = ENGINE_DEFAULTS | {"prompt_share": share} | prices.engine
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
            warn(f"{flag_of(field)}: larger steps than {limit} were not measured")
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
