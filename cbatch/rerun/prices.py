"""Prices of a recorded machine's steps, fitted to the steps of the log. Where the log has no such
steps, prices that were measured when the engine started count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from msgspec.structs import asdict, replace

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.prices.terms import DRAFT, ProfiledCost
from cbatch.engine.prices.fit import fit_profile

MAX_SAMPLES = 6_000  # steps of a log that prices are fitted to, evenly spaced
_STALL = 5.0  # a step that takes this many times its price was interrupted
_MIN_IDLE_S = 1e-4
_EVERY = 50  # every 50th step is also priced in other sizes
_DRAFTS = 4  # drafts per row in such steps
# Fields of `StepWork` that are sums over rows.
_SUMS = {"rows", "decode_rows", "admitted", "decode_pairs", "prefill_pairs"}
_SUMS |= {name for name in StepWork.__struct_fields__ if name.endswith("_tokens")}
_SUMS -= {"decode_longest_tokens", "decode_shortest_tokens"}


def recorded_prices(samples: Sequence[StepSample], start: CostProfile | None) -> CostProfile:
    """Return the prices of all terms. `start` are prices measured at the engine's start. The prices
    of the log's steps add up to their measured durations."""
    chosen = np.linspace(0, len(samples) - 1, min(len(samples), MAX_SAMPLES)).astype(int)
    kept = [samples[i] for i in chosen]
    for work in (sample.work for sample in kept):  # the rest of a decayed idle time has no price
        work.idle_s *= work.idle_s > _MIN_IDLE_S
    other = [] if start is None else list(_other_steps(kept, ProfiledCost(start)))
    cost = ProfiledCost(fit_profile([*kept, *other]))
    pairs = [
        (s.draft_s + s.target_s + s.host_s, sum(cost.step_s(s.work))) for s in kept if s.host_s > 0
    ]
    pairs = [(real_s, price_s) for real_s, price_s in pairs if real_s < _STALL * price_s]
    factor = float(np.divide(*np.sum(pairs, axis=0))) if pairs else 1.0
    return fit_profile([_times(factor, sample) for sample in (*kept, *other)])


def _times(factor: float, sample: StepSample) -> StepSample:
    durations_s = sample.draft_s, sample.target_s, sample.host_s
    return StepSample(sample.work, *(factor * duration_s for duration_s in durations_s))


def with_drafter(prices: CostProfile, samples: Sequence[StepSample]) -> CostProfile:
    """Return `prices` with those of the drafter that made the drafts of `samples`."""
    own = fit_profile(samples)
    fields = {name: own.price(name) for name in DRAFT if name in own.__struct_fields__}
    further = {name: own.price(name) for name in DRAFT if name not in fields}
    return replace(prices, **fields, further=prices.further | further)


def _other_steps(samples: Sequence[StepSample], cost: ProfiledCost) -> Iterator[StepSample]:
    """Yield some of the steps with twice as many rows, and with and without drafts. Their durations
    are those of `cost` at the level of the recorded steps."""
    timed = [sample for sample in samples if sample.target_s > 0]
    level = float(np.median([s.target_s / cost.step_s(s.work)[1] for s in timed])) if timed else 1.0
    for sample, depth, times in product(timed[::_EVERY], (0, _DRAFTS), (1, 2)):
        work = _other_work(sample.work, depth, times)
        yield _times(level, StepSample(work, *cost.step_s(work)[:2]))


def _other_work(work: StepWork, depth: int, times: int) -> StepWork:
    """Return the step with `depth` drafts in each decoding row, and `times` as many rows."""
    more = depth * work.decode_rows - work.draft_tokens
    changed = replace(
        work,
        target_tokens=work.target_tokens + more,
        logit_tokens=work.logit_tokens + more,
        draft_tokens=work.draft_tokens + more,
        draft_context_tokens=work.decode_context_tokens * (depth > 0),
        ingested_tokens=0,
    )
    counts = {name: times * value for name, value in asdict(changed).items() if name in _SUMS}
    return replace(changed, draft_depth=depth * (work.decode_rows > 0), **counts)
