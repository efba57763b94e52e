"""What a step costs: a profile of the machine, corrected online by the durations of real steps.

    target_s = T(n) + g * context + r * rows      n tokens of the target model, drafts among them
    draft_s  = d0 + c0 * depth + c1 * tokens      sequential passes; drafted and caught-up tokens

The profile gives T its shape. Online, each of the two is a small least-squares fit with decayed
sums and the profile as prior inside them: `target_s = s * (T + r * rows) + a + b * n + g * context`
and `draft_s` as above. A scale alone could not mend a wrong slope, and plain recursive least
squares with forgetting loses what steady steps do not excite; here that returns to the profile.

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

from cbatch.core.errors import FieldError

# Sizes that make a feature about 1 in a middling step, so that one prior suits them all.
_TOKENS_UNIT = 128
_CONTEXT_UNIT = 16_384
_LEAST_S = 1e-9  # what a step costs as long as nothing at all is known


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds measured at start-up; serialisable. T runs straight between its points and on beyond
    the last one: a staircase (captured graphs, padded rows) is two points per step."""

    tokens: tuple[int, ...]  # ascending
    target_s: tuple[float, ...]  # with little context; falls are noise and are levelled
    context_token_s: float = 0.0
    row_s: float = 0.0
    draft_setup_s: float = 0.0  # of drafting at all
    draft_pass_s: float = 0.0
    draft_token_s: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        drafting = (self.draft_setup_s, self.draft_pass_s, self.draft_token_s)
        slopes = (self.context_token_s, self.row_s, *drafting)
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
    passes (but from n = 1 on with what drafting costs at all); each depth adds `pass_s`."""

    step_s: np.ndarray
    pass_s: float


class StepLoad(msgspec.Struct, frozen=True):
    """What a step did. `target_tokens` counts drafts, `draft_tokens` drafts and catch-up."""

    rows: int
    target_tokens: int
    context_tokens: int
    depth: int
    draft_tokens: int


class CostModel:
    """The price list of one executor. It is told of steps and asked for prices, in turn."""

    def __init__(self, profile: CostProfile | None = None, *, max_tokens: int) -> None:
        """`max_tokens` is the most target tokens that a step holds."""
        self._counts = np.arange(max_tokens + 1, dtype=np.float64)
        if profile is None:
            self._row_s = 0.0
            self._table = np.zeros(max_tokens + 1)
            self._target = _Fit((0.0, 0.0, 0.0, 0.0), prior_steps=0.1, error=1.0)
            self._draft = _Fit((0.0, 0.0, 0.0), prior_steps=0.1, error=1.0)
            return
        self._row_s = profile.row_s
        self._table = profile.table(max_tokens)
        unit_s = float(self._table[min(_TOKENS_UNIT, max_tokens)])
        self._row_s /= unit_s
        self._table /= unit_s
        context_s = profile.context_token_s * _CONTEXT_UNIT
        token_s = profile.draft_token_s * _TOKENS_UNIT
        draft_s = (profile.draft_setup_s, profile.draft_pass_s, token_s)
        self._target = _Fit((unit_s, 0.0, context_s, 0.0), prior_steps=0.05, error=0.25)
        self._draft = _Fit(draft_s, prior_steps=0.05, error=0.25)

    def observe(self, load: StepLoad, draft_s: float, target_s: float) -> None:
        """A step took so long. Durations that are not positive were not measured: no evidence."""
        if target_s > 0:
            size = self._table[load.target_tokens] + self._row_s * load.rows
            context = load.context_tokens / _CONTEXT_UNIT
            tokens = load.target_tokens / _TOKENS_UNIT
            self._target.observe((float(size), 1.0, context, tokens), target_s)
        if draft_s > 0 and load.depth:
            self._draft.observe((1.0, load.depth, load.draft_tokens / _TOKENS_UNIT), draft_s)

    def prices(
        self, rows: int, base_tokens: int, context_tokens: int, most_drafts: int
    ) -> StepPrices:
        """Prices of a step of `base_tokens` target tokens (one a decoding row, and chunks), `rows`
        rows and 0 to `most_drafts` drafts. Raises IndexError past `max_tokens`."""
        if base_tokens + most_drafts >= len(self._table):
            raise IndexError(f"{base_tokens} + {most_drafts} tokens, prices are to max_tokens")
        scale_s, base_s, context_s, token_s = self._target.solution()
        setup_s, pass_s, draft_s = self._draft.solution()
        token_s /= _TOKENS_UNIT
        step_s = self._table[base_tokens : base_tokens + most_drafts + 1] * scale_s
        context_s *= context_tokens / _CONTEXT_UNIT
        step_s += scale_s * self._row_s * rows + base_s + context_s + token_s * base_tokens
        step_s += self._counts[: most_drafts + 1] * (token_s + draft_s / _TOKENS_UNIT)
        return StepPrices(np.maximum(step_s, _LEAST_S), pass_s)


class _Fit:
    """Non-negative least squares of a duration on a few features, by decayed sums.

    Plain floats: at two or four features arrays would cost more than they compute.
    """

    DECAY = 0.98
    CLIP = 3.0  # times the usual error
    ERROR_DECAY = 0.95
    LEAST_ERROR = 0.02

    def __init__(self, prior_s: Sequence[float], *, prior_steps: float, error: float) -> None:
        self._solution: tuple[float, ...] | None = tuple(prior_s)
        self._prior_s = self._solution
        self._prior_steps = prior_steps
        self._error = error  # the usual relative error
        self._weight = 1.0  # of the newest step
        size = len(prior_s)
        self._products = [[0.0] * size for _ in prior_s]
        self._totals = [0.0] * size

    def observe(self, features: Sequence[float], duration_s: float) -> None:
        expected_s = sum(x * c for x, c in zip(features, self.solution(), strict=True))
        if expected_s > 0:
            error = duration_s / expected_s - 1
            clipped = min(max(error, -self.CLIP * self._error), self.CLIP * self._error)
            kept = self.ERROR_DECAY * self._error + (1 - self.ERROR_DECAY) * abs(clipped)
            self._error = max(kept, self.LEAST_ERROR)
            duration_s = expected_s * (1 + clipped)
        weight = 1 / (expected_s if expected_s > 0 else duration_s) ** 2
        for i, x in enumerate(features):
            row = self._products[i]
            self._totals[i] = self.DECAY * self._totals[i] + weight * x * duration_s
            for j, y in enumerate(features):
                row[j] = self.DECAY * row[j] + weight * x * y
        self._weight = weight
        self._solution = None

    def solution(self) -> tuple[float, ...]:
        """The coefficients in seconds. One that comes out negative is held at 0."""
        if self._solution is None:
            ridge = self._prior_steps * self._weight
            free = list(range(len(self._totals)))
            while True:
                found = self._solve(free, ridge)
                kept = [i for i, value in zip(free, found, strict=True) if value >= 0]
                if len(kept) == len(free):
                    break
                free = kept
            coefficients = [0.0] * len(self._totals)
            for i, value in zip(free, found, strict=True):
                coefficients[i] = value
            self._solution = tuple(coefficients)
        return self._solution

    def _solve(self, free: list[int], ridge: float) -> list[float]:
        """Gaussian elimination of the normal equations; positive definite, so without pivots."""
        rows = [[self._products[i][j] for j in free] for i in free]
        values = [self._totals[i] + ridge * self._prior_s[i] for i in free]
        size = len(free)
        for i in range(size):
            rows[i][i] += ridge
        for i in range(size):
            for k in range(i + 1, size):
                factor = rows[k][i] / rows[i][i]
                values[k] -= factor * values[i]
                for j in range(i, size):
                    rows[k][j] -= factor * rows[i][j]
        for i in reversed(range(size)):
            known = sum(rows[i][j] * values[j] for j in range(i + 1, size))
            values[i] = (values[i] - known) / rows[i][i]
        return values
