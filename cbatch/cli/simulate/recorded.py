"""What a step log says of the engine that recorded it: defaults of a scenario that replays it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from cbatch.cli.simulate.costs import has_device
from cbatch.core.config import SchedulerConfig

if TYPE_CHECKING:
    from cbatch.cli.simulate.scenario import Scenario

_SETTINGS = {
    "max_slots": "max_slots",
    "step_budget": "step_budget_tokens",
    "block_size": "block_size_tokens",
    "num_blocks": "num_blocks",
    "max_model_tokens": "max_model_tokens",
    "queue_policy": "queue_policy",
}


def as_recorded(scenario: Scenario, config: SchedulerConfig) -> tuple[Scenario, dict[str, Any]]:
    """The scenario with the recording engine's settings where no option says otherwise, and these,
    by option. The pool stays that of a device whose memory is known. Lookahead and its prices are
    nothing that a log can answer for: they are options as ever."""
    known = {option: getattr(config, field) for option, field in _SETTINGS.items()}
    known["no_prefix_cache"] = not config.prefix_cache
    if has_device(scenario):
        del known["num_blocks"]
    taken = {name: value for name, value in known.items() if getattr(scenario, name) is None}
    return replace(scenario, **taken), taken


def rules(scenario: Scenario, config: SchedulerConfig | None) -> dict[str, Any]:
    """Fields of the recorded configuration that no option names."""
    if config is None:
        return {}
    found: dict[str, Any] = {"decode_reserve_tokens": config.decode_reserve_tokens}
    if scenario.queue_policy == config.queue_policy:
        found["ageing_per_s"] = config.ageing_per_s
    return found
