"""Lookahead policies by name, and the option that names one."""

from __future__ import annotations

import importlib

import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policies import EmaPolicy, FixedPolicy
from cbatch.core.speculation.policy import LookaheadPolicy, PlannedRows, PolicyLimits

_POLICIES = {
    "off": LookaheadPolicy,
    "fixed": FixedPolicy,
    "ema": EmaPolicy,
    "adaptive": AdaptivePolicy,
}
_FIXED_K, _MAX_K = 4, 8  # defaults of k: the number of drafts of `fixed`, the cap of the others
_REMEDY = (
    "use off, adaptive, ema or fixed (with k as in fixed:4), or your own class as module:Class"
)


def policy_class(name: str) -> type[LookaheadPolicy]:
    """Return a built-in policy, or the class that `module:Class` names. Raises `FieldError`."""
    return _POLICIES.get(name) or _imported(name)


def parse_lookahead(value: str | LookaheadConfig) -> LookaheadConfig:
    """Parse "off", "adaptive", "ema:8", "fixed:4", "module:Class" or "module:Class:6". Raises
    `FieldError`."""
    if isinstance(value, LookaheadConfig):
        return value
    policy, _, k = value.rpartition(":")
    if not k.isdecimal():
        policy, k = value, str(_FIXED_K if value == "fixed" else _MAX_K)
    elif policy == "off":
        raise FieldError("lookahead", f"{value!r} is not known", "use off without a number")
    policy_class(policy)
    return LookaheadConfig() if policy == "off" else LookaheadConfig(policy=policy, k=int(k))


def lookahead_name(config: LookaheadConfig) -> str:
    """Return the string that `parse_lookahead` parses to this configuration."""
    return "off" if config.policy == "off" else f"{config.policy}:{config.k}"


def build_policy(config: LookaheadConfig, limits: PolicyLimits) -> LookaheadPolicy:
    return policy_class(config.policy)(config, limits)


def _imported(name: str) -> type[LookaheadPolicy]:
    module, _, class_name = name.partition(":")
    if not (module and class_name.isidentifier()):
        raise FieldError("lookahead", f"{name!r} is not known", _REMEDY)
    try:
        policy = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise FieldError("lookahead", f"{name!r} cannot be imported ({error})", _REMEDY) from error
    if not (isinstance(policy, type) and issubclass(policy, LookaheadPolicy)):
        remedy = "derive it from cbatch.core.speculation.policy.LookaheadPolicy"
        raise FieldError("lookahead", f"{name!r} is not a policy", remedy)

    class Checked(policy):  # type: ignore[misc, valid-type]
        def choose(self, step: PlannedRows) -> np.ndarray | None:
            chosen: np.ndarray | None = super().choose(step)
            if chosen is not None:  # too many drafts would be written past the reserved blocks
                if chosen.dtype != np.int32 or chosen.shape != (step.num_rows,):
                    expected = f"int32 [{step.num_rows}]"
                    raise ValueError(f"{name}.choose returned {chosen!r}, not {expected}")
                if ((chosen < 0) | (chosen > step.max_drafts)).any():
                    limits = f"max_drafts are {step.max_drafts!r}"
                    raise ValueError(f"{name}.choose returned {chosen!r}, {limits}")
            return chosen

    return Checked
