"""Fit of prices to measured steps: the steps are observed several times by the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError

_ROUNDS = 8


def fit_profile(samples: Sequence[StepSample], start: CostProfile | None = None) -> CostProfile:
    """Return the prices that fit the samples best. Prices of which the samples say nothing are
    those of `start`. A duration of 0 was not measured. Raises `FieldError` without prices."""
    costs, rng = StepCosts(start, drifts=False), np.random.default_rng(0)
    for _ in range(_ROUNDS):
        for i in rng.permutation(len(samples)).tolist():
            costs.observe(samples[i])
    if not costs.is_known:
        raise FieldError("samples", "are none", "measure some steps")
    return costs.profile
