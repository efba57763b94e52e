"""What a step costs: read off the durations of real steps, from a profile of the machine onwards.

    target_s = T(n) + g * context          draft_s = s + depth * P(rows) + i * ingested

n tokens go through the target model, drafts among them; drafting takes `depth` sequential passes,
and s, which is the profile's, if it is done at all; `ingested` are tokens that the drafter had not
seen and catches up on.

T and P are curves (step_curve.py). Without a profile more tokens look cheap until they are tried.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.speculation.step_curve import MEMORY_STEPS, StepCurve

OWED_TOKENS = 8  # a drafter that is behind a row by fewer owes it nothing


class StepPrices(msgspec.Struct, frozen=True):
    """`step_s[n]` is a step with n drafts in all, float64 [1 + most drafts], without the drafter's
    passes; each depth adds `pass_s`, each token that the drafter catches up on `ingest_s`."""

    step_s: np.ndarray
    pass_s: float
    ingest_s: float = 0.0


class OnlineCostModel:
    """The price list of one executor. It is told of steps and asked for prices, in turn."""

    def __init__(self, profile: CostProfile | None = None, *, max_tokens: int) -> None:
        """`max_tokens` is the most target tokens that a step holds."""
        self._max_tokens = max_tokens
        self._target, self._pass = StepCurve(max_tokens), StepCurve(max_tokens)
        self._setup_s = self._ingest_s = 0.0
        if profile is not None:
            self._target.slope_s = profile.context_token_s
            table = profile.table(max_tokens).tolist()
            # To the end: how many more tokens cost, beyond what was tried, is the profile's to say.
            for count in (*(n for n in profile.tokens if n < max_tokens), max_tokens):
                extra_s = (profile.logits_token_s + profile.row_s) * count
                self._target.observe(count, table[count] + extra_s, 0)
                drafting_s = profile.draft_pass_s + profile.draft_token_s * count
                self._pass.observe(count, drafting_s, 0)
            self._setup_s, self._ingest_s = profile.draft_setup_s, profile.draft_ingest_s
            self._target.hold_weakly()

    def observe(self, sample: StepSample) -> None:
        """A step took so long. Durations that are not positive were not measured: no evidence."""
        work = sample.work
        if sample.target_s > 0 and work.target_tokens:
            self._target.observe(work.target_tokens, sample.target_s, work.context_tokens)
        draft_s, depth = sample.draft_s, work.draft_depth
        if draft_s <= 0:
            return
        pass_s = float(self._pass.over(work.rows, 0))
        expected_s = self._setup_s + depth * pass_s
        if work.ingested_tokens > 2 * work.rows + OWED_TOKENS:
            ingest_s = max(draft_s - expected_s, 0.0) / work.ingested_tokens
            self._ingest_s += (ingest_s - self._ingest_s) / MEMORY_STEPS
        elif depth:
            pass_s = pass_s * draft_s / expected_s if self._setup_s else draft_s / depth
            self._pass.observe(max(work.draft_tokens / depth, 1.0), pass_s, 0)

    @property
    def is_known(self) -> bool:
        """Whether there is a price at all: a profile's or a step's."""
        return bool(self._target.known)

    def is_measured(self, target_tokens: int) -> bool:
        """Whether real steps of about so many have been seen: a profile is of another day."""
        return target_tokens > 0 and self._target.num_seen_about(target_tokens) > 1

    def prices(self, rows: int, context_tokens: int, most_drafts: int) -> StepPrices:
        """Prices of a step of `rows` decoding rows, a token each, and 0 to `most_drafts` drafts.
        Raises IndexError past `max_tokens`."""
        if rows + most_drafts > self._max_tokens:
            raise IndexError(f"{rows} + {most_drafts} tokens, prices are to max_tokens")
        step_s = self._target.over(np.arange(rows, rows + most_drafts + 1), context_tokens)
        step_s[1:] += self._setup_s
        return StepPrices(step_s, float(self._pass.over(rows, 0)), self._ingest_s)
