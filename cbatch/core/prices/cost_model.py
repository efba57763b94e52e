"""The price of a step: given by a profile of the machine at first, then learned from real steps.

    target_s = T(n) + g * context          draft_s = s + depth * P(rows) + i * ingested

n is the number of tokens through the target model, drafts included. The drafter makes `depth`
sequential passes, and catches up on `ingested` tokens; s is its fixed cost, from the profile. T and
P are curves. T has one curve for steps with drafts and one for steps without, because drafts cost
the host more. Without a profile, drafts look cheap until they are tried.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_curve import MEMORY_STEPS, StepCurve
from cbatch.core.prices.step_work import StepSample

MIN_LAG_TOKENS = 8  # catching up on fewer tokens costs a drafter almost nothing


class StepPrices(msgspec.Struct, frozen=True):
    """`step_s[n]`: seconds of a step with n drafts in all, without the drafter's passes, float64
    [1 + most drafts]. `pass_s`: seconds of a pass. `ingest_s`: seconds of a catch-up token."""

    step_s: np.ndarray
    pass_s: float
    ingest_s: float = 0.0


class OnlineCostModel:
    """Prices of one executor's steps. `observe` updates them, `prices` returns them."""

    def __init__(self, profile: CostProfile | None = None, *, max_tokens: int) -> None:
        """`max_tokens` is the most target tokens of a step."""
        self._max_tokens = max_tokens
        self._plain, self._drafted, self._pass = (StepCurve(max_tokens) for _ in range(3))
        self._setup_s = self._ingest_s = 0.0
        self._table: np.ndarray | None = None
        if profile is None:
            return
        self._table = profile.table(max_tokens)
        # Up to `max_tokens`, so that the profile prices counts that no step has had yet.
        for count in (*(n for n in profile.tokens if n < max_tokens), max_tokens):
            self._pass.observe(count, profile.draft_pass_s + profile.draft_token_s * count, 0)
            target_s = float(self._table[count]) + (profile.logits_token_s + profile.row_s) * count
            for curve in (self._plain, self._drafted):
                curve.observe(count, target_s, 0)
        for curve in (self._plain, self._drafted):
            curve.slope_s = profile.context_token_s
            curve.reduce_weights()
        self._setup_s, self._ingest_s = profile.draft_setup_s, profile.draft_ingest_s

    def observe(self, sample: StepSample) -> None:
        """Learn from a measured step. A duration of 0 or less was not measured. Tokens without
        logits belong to prompts, so their time is deducted in proportion to the profile."""
        work, target_s, tokens = sample.work, sample.target_s, sample.work.target_tokens
        curve = self._drafted if work.draft_tokens else self._plain
        if 0 < work.logit_tokens < tokens and curve.known:
            table = self._table  # not the learned curve, because an error would reinforce itself
            target_s *= 0.0 if table is None else float(table[work.logit_tokens] / table[tokens])
            tokens = work.logit_tokens
        if target_s > 0 and tokens:
            curve.observe(tokens, target_s, work.context_tokens)
        draft_s, depth = sample.draft_s, work.draft_depth
        if draft_s <= 0:
            return
        pass_s = float(self._pass.seconds_at(work.rows, 0))
        expected_s = self._setup_s + depth * pass_s
        if work.ingested_tokens > 2 * work.rows + MIN_LAG_TOKENS:
            ingest_s = max(draft_s - expected_s, 0.0) / work.ingested_tokens
            self._ingest_s += (ingest_s - self._ingest_s) / MEMORY_STEPS
        elif depth:
            pass_s = pass_s * draft_s / expected_s if self._setup_s else draft_s / depth
            self._pass.observe(max(work.draft_tokens / depth, 1.0), pass_s, 0)

    @property
    def is_known(self) -> bool:
        """True if a profile or a step has given a price."""
        return bool(self._plain.known or self._drafted.known)

    def is_measured(self, target_tokens: int, *, drafts: bool = False) -> bool:
        """Return whether real steps of about `target_tokens` tokens were seen, with drafts if
        `drafts`, else without. The profile does not count."""
        curve = self._drafted if drafts else self._plain
        return target_tokens > 0 and curve.num_steps_near(target_tokens) > 1

    def prices(self, rows: int, context_tokens: int, max_drafts: int) -> StepPrices:
        """Return the prices of steps with `rows` decoding rows and 0 to `max_drafts` drafts in
        all. Raises IndexError past `max_tokens`."""
        if rows + max_drafts > self._max_tokens:
            raise IndexError(f"{rows} + {max_drafts} tokens, prices are to max_tokens")
        plain, drafted = self._plain, self._drafted
        plain, drafted = plain if plain.known else drafted, drafted if drafted.known else plain
        plain_s, counts = float(plain.seconds_at(rows, context_tokens)), np.arange(max_drafts + 1)
        min_count = max(drafted.min_count, rows + 1)  # below it, interpolate from `plain_s`
        step_s = drafted.seconds_at(np.maximum(rows + counts, min_count), context_tokens)
        step_s = plain_s + np.minimum(counts / (min_count - rows), 1) * (step_s - plain_s)
        step_s = np.maximum(step_s, plain_s)
        step_s[1:] += self._setup_s
        return StepPrices(step_s, float(self._pass.seconds_at(rows, 0)), self._ingest_s)
