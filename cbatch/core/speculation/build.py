"""A lookahead policy by its name."""

from __future__ import annotations

import importlib

import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.goodput_policy import GoodputPolicy
from cbatch.core.speculation.policies import EmaPolicy, FixedPolicy
from cbatch.core.speculation.policy import LookaheadPolicy, PlannedRows, PolicyLimits

_POLICIES = {
    "off": LookaheadPolicy,
    "fixed": FixedPolicy,
    "ema": EmaPolicy,
    "goodput": GoodputPolicy,
}
_REMEDY = (
    "use off, goodput, ema or fixed, the last three with k as in goodput:8, or a class of your own "
    "as module:Class"
)


def policy_class(name: str) -> type[LookaheadPolicy]:
    """One of ours, or a class that `module:Class` names. Raises `FieldError`."""
    found = _POLICIES.get(name)
    return _imported(name) if found is None else found


def build_policy(config: LookaheadConfig, limits: PolicyLimits) -> LookaheadPolicy:
    return policy_class(config.policy)(config, limits)


def _imported(name: str) -> type[LookaheadPolicy]:
    module, _, wanted = name.partition(":")
    if not (module and wanted.isidentifier()):
        raise FieldError("lookahead", f"{name!r} is not known", _REMEDY)
    try:
        found = getattr(importlib.import_module(module), wanted)
    except (ImportError, AttributeError) as error:
        raise FieldError("lookahead", f"{name!r} cannot be had ({error})", _REMEDY) from error
    if not (isinstance(found, type) and issubclass(found, LookaheadPolicy)):
        remedy = "derive it from cbatch.core.speculation.policy.LookaheadPolicy"
        raise FieldError("lookahead", f"{name!r} is no policy", remedy)

    class Checked(found):  # type: ignore[misc, valid-type]
        def choose(self, step: PlannedRows) -> np.ndarray | None:
            chosen: np.ndarray | None = super().choose(step)
            if chosen is not None:
                _require_choice(name, chosen, step)
            return chosen

    return Checked


def _require_choice(name: str, chosen: np.ndarray, step: PlannedRows) -> None:
    """Raises ValueError: blocks would be written that nobody reserved."""
    if chosen.dtype != np.int32 or chosen.shape != (step.num_rows,):
        was = f"{chosen.dtype} {list(chosen.shape)}"
        raise ValueError(f"{name}.choose returned {was}, not int32 [{step.num_rows}]")
    if ((chosen < 0) | (chosen > step.caps)).any():
        raise ValueError(f"{name}.choose returned {chosen.tolist()}, caps are {step.caps.tolist()}")
