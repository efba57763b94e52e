"""The cost model of steps: a `CostProfile` that measured steps correct.

The scheduler's chunks, the lookahead policy and the estimates for time targets ask it. Durations
are wall time, the host's part included. What the drafter takes is learned apart, from its own
measured time, so that drafts never count as the cost of a chunk.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import structs

from cbatch.core.prices.cost_profile import MAX_CORNER, CostProfile, corner_s
from cbatch.core.prices.robust_fit import RobustFit
from cbatch.core.prices.step_work import StepSample, StepWork

# Prices of a machine of which nothing is known, as shares of `base_s`, and how far they may be off.
_UNKNOWN = CostProfile(
    1.0, 0.003, 1.5, 0.001, 2e-6, 5e-6, 0.02, 0.02, draft_pass_s=0.05, draft_token_s=0.001
)
_SPREAD = np.array([0.3, 0.06, 0.5, 0.02, 3e-5, 5e-5, 0.3, 0.3, 0.5, 0.01])
_FIRST_STEPS = 3  # steps of an unknown machine; the median gives its first prices
_PROFILED = 0.5  # how far prices of a profile may be off, relative
_CORNER, _VERIFY, _FIRST_DRAFT = 2, 7, 8  # places in `CostProfile`
_SHOWN_MEMORY = 8  # steps over which the drafter's share that counts is averaged
# A profile's price may wrongly be near 0: a share of an unknown machine's error is added. The share
# of `verify_s` is the largest, so that drafts that take far longer than profiled soon cease.
_UNPROFILED = np.full(10, 0.3)
_UNPROFILED[_VERIFY] = 8.0
_LOWEST, _IS_SECONDS = np.zeros(8), np.ones(8)
_LOWEST[_CORNER], _IS_SECONDS[_CORNER] = 1.0, 0.0
_HIGHEST = np.where(_IS_SECONDS > 0, np.inf, MAX_CORNER)


class StepPrices:
    """`step_s`: seconds of steps with some numbers of drafts, without the drafter's passes, float64
    [k]. `pass_s`: seconds of a pass. `ingest_s`: seconds of a token that the drafter computes."""

    def __init__(self, step_s: np.ndarray, pass_s: float, ingest_s: float = 0.0) -> None:
        self.step_s, self.pass_s, self.ingest_s = step_s, pass_s, ingest_s


class StepCosts:
    """Prices of one executor's steps. `observe` corrects them."""

    def __init__(self, profile: CostProfile | None = None, *, drifts: bool = True) -> None:
        """`drifts`: prices may change while they are measured."""
        self._drifts = drifts
        self._shown = 1.0  # share of the drafter's time that counts
        self._num_observed = {False: 0, True: 0}  # steps without chunks, with drafts or without
        self._first: list[StepSample] = []  # while there are no prices
        self._target: RobustFit | None = None
        self._draft: RobustFit | None = None
        if profile is not None:
            self._start(profile, _PROFILED)

    def _start(self, profile: CostProfile, accuracy: float) -> None:
        """Start from a profile. `accuracy` is the relative error of its prices."""
        prices = np.array(structs.astuple(profile))
        spread = _SPREAD * profile.base_s
        spread[_CORNER] = _SPREAD[_CORNER]
        if accuracy < 1:
            spread = accuracy * (prices + _UNPROFILED * spread)
        lowest = _LOWEST.copy()
        lowest[0] = 1e-3 * profile.base_s
        target, draft = slice(0, _FIRST_DRAFT), slice(_FIRST_DRAFT, None)
        self._target = RobustFit(
            prices[target],
            spread[target],
            common=accuracy,
            drifts=self._drifts,
            lowest=lowest,
            highest=_HIGHEST,
            is_seconds=_IS_SECONDS,
        )
        self._draft = RobustFit(prices[draft], spread[draft], common=accuracy, drifts=self._drifts)

    @property
    def is_known(self) -> bool:
        """True if a profile or a step has given prices."""
        return self._target is not None

    @property
    def profile(self) -> CostProfile:
        """Return the present prices. Call it once they are known."""
        assert self._target is not None and self._draft is not None
        return CostProfile(*self._target.prices.tolist(), *self._draft.prices.tolist())

    def is_measured(self, *, drafts: bool) -> bool:
        """Return whether steps with drafts, or without, were observed. A profile does not count."""
        return self._num_observed[drafts] > 1

    def observe(self, sample: StepSample) -> None:
        """Learn from a measured step. A duration of 0 or less was not measured."""
        work = sample.work
        if sample.rest_s > 0 and work.target_tokens:
            if not work.prefill_tokens:
                self._num_observed[work.draft_tokens > 0] += 1
            self._first.append(sample)
            if self._target is None and len(self._first) == _FIRST_STEPS:
                self._start(scaled(_UNKNOWN, _median_speed(self._first)), 1.0)
            if self._target is not None:
                for first in self._first:
                    self._target.observe(first.rest_s, *self.gradient(first.work))
                self._first.clear()
        passes, tokens = work.draft_depth, work.draft_tokens + work.ingested_tokens
        draft_s = sample.draft_s + sample.hidden_s
        if draft_s > 0 and self._draft is not None and (passes or tokens):
            counts = np.array([passes, tokens], np.float64)
            self._draft.observe(draft_s, float(self._draft.prices @ counts), counts)
            self._shown += (sample.draft_s / draft_s - self._shown) / _SHOWN_MEMORY

    def prices(self, rows: int, context_tokens: int, drafts: np.ndarray) -> StepPrices:
        """Return the prices of steps with `rows` decoding rows and these drafts in all."""
        assert self._draft is not None and self._target is not None
        tokens = rows + drafts
        pairs = context_tokens / max(rows, 1) * tokens
        step_s = self.seconds(tokens, tokens, context_tokens, pairs)
        step_s += self._target.prices[_VERIFY] * (drafts > 0)
        return StepPrices(step_s, *(self._shown * self._draft.prices).tolist())

    def seconds(
        self,
        tokens: np.ndarray,
        logits: np.ndarray | float,
        context: np.ndarray | float,
        pairs: np.ndarray | float,
    ) -> np.ndarray:
        """Return the seconds of steps without chunks and drafts, float64 [k]."""
        assert self._target is not None
        base_s, token_s, corner, logit_s, context_s, pair_s = self._target.prices[:6]
        rest_s = logit_s * logits + context_s * context + pair_s * pairs
        seconds: np.ndarray = corner_s(base_s, token_s * tokens, corner) + rest_s
        return seconds

    def with_chunks(self, work: StepWork, sizes: np.ndarray, history: int) -> np.ndarray:
        """Return the seconds of the step `work` with chunks of these `sizes`, float64 [k], after
        `history` tokens of the prompt."""
        assert self._target is not None
        context = work.context_tokens + history + sizes
        pairs = work.pairs + sizes * (history + sizes / 2)
        seconds = self.seconds(work.target_tokens + sizes, work.logit_tokens, context, pairs)
        chunk_s, verify_s = self._target.prices[6:].tolist()
        seconds += chunk_s + verify_s * (work.draft_tokens > 0)
        return seconds

    def variance_of_ratio(self, work: StepWork, other: StepWork) -> float:
        """Return the variance of the logarithm of the ratio of two durations."""
        assert self._target is not None
        (seconds, gradient), (others, other_gradient) = map(self.gradient, (work, other))
        return self._target.variance(gradient / seconds - other_gradient / others)

    def draft_s(self, work: StepWork) -> float:
        """Return the seconds of the drafter's passes and catch-up."""
        assert self._draft is not None
        counts = work.draft_depth, work.draft_tokens + work.ingested_tokens
        return float(self._draft.prices @ counts)

    def gradient(self, work: StepWork) -> tuple[float, np.ndarray]:
        """Return the seconds of a step without the drafter's, and their derivative by each price,
        float64 [8]."""
        assert self._target is not None
        prices = self._target.prices
        base_s, token_s, corner = prices[:3].tolist()
        tokens = work.target_tokens
        power = (token_s * tokens / base_s) ** corner
        both_s = corner_s(base_s, token_s * tokens, corner)
        rest = 1 / (1 + power)
        share = power * rest  # of the tokens
        entropy = rest * math.log(rest) + (share and share * math.log(share))
        counts = (
            (base_s / both_s) ** (corner - 1),
            tokens * (token_s * tokens / both_s) ** (corner - 1),
            both_s * entropy / corner**2,
            work.logit_tokens,
            work.context_tokens,
            work.pairs,
            work.prefill_tokens > 0,
            work.draft_tokens > 0,
        )
        gradient = np.array(counts, np.float64)
        return both_s + float(prices[3:] @ gradient[3:]), gradient


def scaled(profile: CostProfile, factor: float) -> CostProfile:
    """Return the prices of a machine that takes `factor` times as long."""
    prices = factor * np.array(structs.astuple(profile))
    prices[_CORNER] = profile.corner
    return CostProfile(*prices.tolist())


def _median_speed(samples: list[StepSample]) -> float:
    """Return the median duration relative to the prices of an unknown machine."""
    ratios = sorted(s.rest_s / _UNKNOWN.step_s(s.work)[1] for s in samples)
    return ratios[len(ratios) // 2]
