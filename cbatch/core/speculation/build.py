"""A lookahead policy from its configuration."""

from __future__ import annotations

from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.cost_model import CostProfile
from cbatch.core.speculation.goodput_policy import GoodputPolicy
from cbatch.core.speculation.policies import EmaPolicy, FixedPolicy
from cbatch.core.speculation.policy import LookaheadPolicy


def build_policy(
    config: LookaheadConfig, *, max_slots: int, max_tokens: int, profile: CostProfile | None
) -> LookaheadPolicy:
    """`max_tokens` is the most target tokens of a step."""
    if config.policy == "fixed":
        return FixedPolicy(config)
    if config.policy == "ema":
        return EmaPolicy(config, max_slots=max_slots)
    if config.policy == "goodput":
        return GoodputPolicy(config, max_slots=max_slots, max_tokens=max_tokens, profile=profile)
    return LookaheadPolicy()
