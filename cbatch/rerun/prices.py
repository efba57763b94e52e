"""Prices of a recorded machine's steps, fitted to the steps of the log. Where the log has no such
steps, prices that were measured when the engine started count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import scaled
from cbatch.core.prices.step_work import StepSample
from cbatch.engine.prices.fit import fit_profile

MAX_SAMPLES = 6_000  # steps of a log that prices are fitted to, evenly spaced
_STALL = 5.0  # a step that takes this many times its price was interrupted


def recorded_prices(samples: Sequence[StepSample], start: CostProfile | None) -> CostProfile:
    """Return the prices of all terms. `start` are prices measured at the engine's start. The prices
    of the log's steps add up to their measured durations."""
    chosen = np.linspace(0, len(samples) - 1, min(len(samples), MAX_SAMPLES)).astype(int)
    kept = [samples[i] for i in chosen]
    prices = fit_profile(kept, start)
    pairs = [
        (s.draft_s + s.target_s + s.host_s, sum(prices.step_s(s.work))) for s in kept if s.host_s
    ]
    pairs = [(real_s, price_s) for real_s, price_s in pairs if real_s < _STALL * price_s]
    return scaled(prices, float(np.divide(*np.sum(pairs, axis=0)))) if pairs else prices


def with_drafter(prices: CostProfile, samples: Sequence[StepSample]) -> CostProfile:
    """Return `prices` with those of the drafter that made the drafts of `samples`. The rest of such
    a step takes what it is priced at: a rerun does not run the target model."""
    timed = [replace(s, target_s=prices.step_s(s.work)[1], host_s=0.0) for s in samples]
    own = fit_profile(timed)
    drafter = {"draft_pass_s": own.draft_pass_s, "draft_token_s": own.draft_token_s}
    return replace(prices, **drafter)
