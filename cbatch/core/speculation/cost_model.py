"""What a step costs: a profile of the machine, corrected online by the durations of real steps.

    target_s = T(n) + l * logits + (g + v if any token is a draft) * context + r * rows
    draft_s  = d0 + c0 * depth + c1 * drafts + c2 * ingested

n tokens go through the target model, drafts among them; of `logits` of these the logits are wanted
(a token of a prompt costs less than one that is verified). Drafting takes `depth` sequential
passes; `ingested` are tokens that the drafter had not seen and catches up on.

The profile gives the shape. Online there are two time scales. The machine's *speed* of the moment
is followed within a few steps and scales every price: it changes no decision, but what a step says
about the shape is read beside those around it. The *shape* is, for each of the two, a small
least-squares fit with slowly decaying sums and the profile as prior inside them; plain recursive
least squares with forgetting would lose what steady steps do not excite, here that returns to the
profile.

Errors are relative, so that a chunk of 500 tokens does not outweigh a decode, and clipped at a few
times their usual size (Huber): one stall of a busy machine moves a fit as little as one bad step.
Without a profile everything starts at nearly nothing known: drafts look cheap, are tried, and teach
their price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.step_work import StepSample

_ROUNDING = 1e-6
_SPEED_GAIN = 0.2
_DOUBT, _SURE_STEPS = 0.15, 4.0
_LEAST_S = 1e-9  # what a step costs as long as nothing at all is known


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds measured at start-up; serialisable. T runs straight between its points and on beyond
    the last one: a staircase (captured graphs, padded rows) is two points per step."""

    tokens: tuple[int, ...]  # ascending
    target_s: tuple[float, ...]  # with little context; falls are noise and are levelled
    logits_token_s: float = 0.0  # beyond T: of a token whose logits are wanted
    context_token_s: float = 0.0
    verify_context_token_s: float = 0.0  # beyond that in a step that verifies drafts
    row_s: float = 0.0
    draft_setup_s: float = 0.0  # of drafting at all
    draft_pass_s: float = 0.0
    draft_token_s: float = 0.0
    draft_ingest_s: float = 0.0  # of a token that the drafter catches up on

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        drafting = (self.draft_setup_s, self.draft_pass_s, self.draft_token_s, self.draft_ingest_s)
        contexts = (self.context_token_s, self.verify_context_token_s)
        slopes = (self.logits_token_s, *contexts, self.row_s, *drafting)
        for field, ok, remedy in (
            ("tokens", len(self.tokens) >= 2, "give at least two points"),
            ("tokens", ascending and min(self.tokens, default=0) >= 1, "give ascending counts"),
            ("target_s", len(self.target_s) == len(self.tokens), "give one duration a count"),
            ("target_s", all(0 < s < math.inf for s in self.target_s), "give positive seconds"),
            ("slopes", all(0 <= s < math.inf for s in slopes), "give seconds of 0 or more"),
        ):
            if not ok:
                raise FieldError(f"cost_profile.{field}", "is not a profile", remedy)

    def table(self, max_tokens: int) -> np.ndarray:
        """T(0) to T(max_tokens), float64, never falling."""
        points = np.maximum.accumulate(np.asarray(self.target_s))
        counts = np.arange(max_tokens + 1)
        table: np.ndarray = np.interp(counts, self.tokens, points)
        slope_s = (points[-1] - points[-2]) / (self.tokens[-1] - self.tokens[-2])
        table += slope_s * np.maximum(counts - self.tokens[-1], 0)
        return table


class StepPrices(msgspec.Struct, frozen=True):
    """`step_s[n]` is a step with n drafts in all, float64 [1 + most drafts], without the drafter's
    passes (but from n = 1 on with what drafting costs at all); each depth adds `pass_s`, each token
    that the drafter catches up on `ingest_s`."""

    step_s: np.ndarray
    pass_s: float
    ingest_s: float = 0.0

    def cheaper(self, share: float) -> StepPrices:
        """With whatever drafting adds to a step less by `share`."""
        step_s = self.step_s - share * (self.step_s - self.step_s[0])
        return StepPrices(step_s, (1 - share) * self.pass_s, (1 - share) * self.ingest_s)


class OnlineCostModel:
    """The price list of one executor. It is told of steps and asked for prices, in turn."""

    def __init__(self, profile: CostProfile | None = None, *, max_tokens: int) -> None:
        """`max_tokens` is the most target tokens that a step holds."""
        self._counts = np.arange(max_tokens + 1, dtype=np.float64)
        known = profile is not None
        self._profile = profile or CostProfile((1, 2), (1.0, 1.0))
        self._table = self._profile.table(max_tokens) if known else np.zeros(max_tokens + 1)
        self._target, self._draft = _Fit(6, profiled=known), _Fit(4, profiled=known)
        self._slowness = 1.0  # seconds now for a second of the shape
        self._drafting_steps: dict[int, float] = {}  # seen, decayed, by the size of the batch

    def observe(self, sample: StepSample) -> None:
        """A step took so long. Durations that are not positive were not measured: no evidence."""
        work, profile, error = sample.work, self._profile, 0.0
        if sample.target_s > 0:
            logits, context = work.logit_tokens, work.context_tokens
            verifying = context if work.draft_tokens else 0
            size_s = float(self._table[work.target_tokens]) + profile.row_s * work.rows
            size_s += profile.logits_token_s * logits
            size_s += profile.context_token_s * context
            size_s += profile.verify_context_token_s * verifying
            features = (size_s, 1.0, context, verifying, logits, work.target_tokens - logits)
            error = self._target.observe(features, sample.target_s / self._slowness)
        if sample.draft_s > 0 and (work.draft_depth or work.ingested_tokens):
            depth, drafts, ingested = work.draft_depth, work.draft_tokens, work.ingested_tokens
            size_s = profile.draft_setup_s * (depth > 0) + profile.draft_pass_s * depth
            size_s += profile.draft_token_s * drafts
            size_s += profile.draft_ingest_s * ingested
            drafting = (size_s, depth, drafts, ingested)
            self._draft.observe(drafting, sample.draft_s / self._slowness)
        self._slowness *= (1 + error) ** _SPEED_GAIN
        size = work.rows.bit_length()
        seen = self._drafting_steps.get(size, 0.0)
        self._drafting_steps[size] = _Fit.DECAY * seen + (work.draft_tokens > work.rows // 2)

    def optimism(self, rows: int) -> float:
        """By what share drafting may be cheaper than its price says: much while about so many rows
        have hardly drafted yet, nothing once it is known."""
        return _DOUBT / (1 + self._drafting_steps.get(rows.bit_length(), 0.0) / _SURE_STEPS)

    def prices(
        self, rows: int, base_tokens: int, context_tokens: int, most_drafts: int
    ) -> StepPrices:
        """Prices of a step of `base_tokens` target tokens (one a decoding row, and chunks), `rows`
        decoding rows and 0 to `most_drafts` drafts. Raises IndexError past `max_tokens`."""
        if base_tokens + most_drafts >= len(self._table):
            raise IndexError(f"{base_tokens} + {most_drafts} tokens, prices are to max_tokens")
        profile, slowness = self._profile, self._slowness
        scale, base_s, context_s, verify_s, logits_s, others_s = self._target.solution()
        draft_scale, pass_s, draft_s, ingest_s = self._draft.solution()
        context_s += scale * profile.context_token_s
        verify_s += scale * profile.verify_context_token_s
        logits_s += scale * profile.logits_token_s
        draft_s += draft_scale * profile.draft_token_s
        base_s += (scale * profile.row_s + logits_s) * rows + others_s * (base_tokens - rows)
        step_s = self._table[base_tokens : base_tokens + most_drafts + 1] * scale
        step_s += base_s + context_s * context_tokens
        step_s += self._counts[: most_drafts + 1] * (logits_s + draft_s)
        step_s[1:] += draft_scale * profile.draft_setup_s + verify_s * context_tokens
        step_s *= slowness
        return StepPrices(
            np.maximum(step_s, _LEAST_S),
            slowness * (pass_s + draft_scale * profile.draft_pass_s),
            slowness * (ingest_s + draft_scale * profile.draft_ingest_s),
        )


class _Fit:
    """Non-negative least squares of a duration on a few features, by decayed sums.

    The first feature is what the profile says and has a coefficient near 1; the others correct it
    and are near 0: a fixed cost, and costs by token. The prior of a coefficient says by what share
    of a step its feature, at its usual size, is off; the noisier the steps, the more of them it
    takes to speak against it.
    """

    DECAY = 0.995
    CLIP = 3.0  # times the usual error
    ERROR_DECAY = 0.95
    SOLVE_STEPS = 4  # a solution serves for so many
    LEAST_ERROR = 0.02
    SCALE_DOUBT, SHAPE_DOUBT = 0.5, 0.1
    # Without a profile: what equal steps do not tell apart is fixed cost rather than cost by token.
    FIXED_STEPS, TOKEN_STEPS = 1e-3, 3e-2

    def __init__(self, size: int, *, profiled: bool) -> None:
        self._doubt: np.ndarray | None = None  # without a profile there is nothing to doubt
        if profiled:
            self._doubt = np.array((self.SCALE_DOUBT, *(self.SHAPE_DOUBT,) * (size - 1)))
        fixed = (self.FIXED_STEPS, self.FIXED_STEPS)
        self._unknown_steps = np.array((*fixed, *(self.TOKEN_STEPS,) * (size - 2)))
        self._prior = np.array((float(profiled), *(0.0,) * (size - 1)))
        self._solution: tuple[float, ...] = tuple(self._prior.tolist())
        self._num_steps = self._unsolved_steps = 0
        self._free = np.ones(size, dtype=np.bool_)
        self._error = 0.25 if profiled else 1.0  # the usual relative error
        self._steps = np.full(size, 1e-9)  # in which a feature was not 0
        self._products = np.zeros((size, size))
        self._totals = np.zeros(size)

    def observe(self, features: Sequence[float], duration_s: float) -> float:
        """Returns the relative error of what was expected, clipped; 0 if nothing was."""
        clipped = 0.0
        expected_s = sum(x * c for x, c in zip(features, self.solution(), strict=True))
        if expected_s > 0:
            error = duration_s / expected_s - 1
            clipped = min(max(error, -self.CLIP * self._error), self.CLIP * self._error)
            kept = self.ERROR_DECAY * self._error + (1 - self.ERROR_DECAY) * abs(clipped)
            self._error = max(kept, self.LEAST_ERROR)
            duration_s = expected_s * (1 + clipped)
        scale_s = expected_s if expected_s > 0 else duration_s
        scaled = np.array(features) / scale_s
        self._steps *= self.DECAY
        self._steps += scaled != 0
        self._num_steps += 1
        self._products *= self.DECAY
        self._products += scaled[:, None] * scaled
        self._totals *= self.DECAY
        self._totals += scaled * (duration_s / scale_s)
        self._unsolved_steps += 1
        return clipped

    def solution(self) -> tuple[float, ...]:
        """The coefficients. One that comes out negative is held at 0."""
        fresh = self._num_steps < 2 * self.SOLVE_STEPS
        if self._unsolved_steps >= (1 if fresh else self.SOLVE_STEPS):
            self._unsolved_steps = 0
            sizes = self._products.diagonal()
            steps = self._unknown_steps
            if self._doubt is not None:
                steps = (self._error / self._doubt) ** 2
            prior = sizes * steps / self._steps
            products, totals = np.diag(prior) + self._products, prior * self._prior + self._totals
            found = _solve(products, totals, self._free & (sizes > 0))
            missed = (totals - products @ found > _ROUNDING * np.abs(totals)) & ~self._free
            if np.count_nonzero(missed):  # held at 0 so far, and would be positive now
                found = _solve(products, totals, sizes > 0)
            while np.minimum.reduce(found) < 0:
                found = _solve(products, totals, found > 0)
            self._free = found > 0
            self._solution = tuple(found.tolist())
        return self._solution


def _solve(products: np.ndarray, totals: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Of the normal equations, float64 [n]; 0 where not `free`."""
    kept = free.astype(np.float64)
    within = products * kept * kept[:, None] + np.diag(1 - kept)
    found: np.ndarray = np.linalg.solve(within, totals * kept)
    return found
