"""What a step costs: read off the durations of real steps, from a profile of the machine onwards.

    target_s = T(n) + g * context          draft_s = depth * P(rows) + i * ingested

n tokens go through the target model, drafts among them; drafting takes `depth` sequential passes;
`ingested` are tokens that the drafter had not seen and catches up on.

T and P are curves through points, a few to a doubling of n: what was measured lately about there.
Nothing is assumed of their shape but that they do not fall. So what a step with drafts takes over
one without, which is all that a decision goes by, is measured where it is asked for, and one step
without drafts among many with them is enough to know. Steps only ever get longer by what else a
machine does: of a duration far above what was expected part is believed, one far below at once, and
no point lies above those to its right. The machine's *speed* of the moment, which changes no
decision, is followed apart.

Without a profile more tokens look cheap until they are tried, and teach their price.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.speculation.step_work import StepSample

_POINTS = 2  # to a doubling
_MEMORY_STEPS = 24.0  # of a point
_SURPRISE = 1.5  # times what was expected, or its inverse: a stall, or news
_SPEED_GAIN = 0.1
_UNTRIED = 0.1  # of a token's share of a step: what each costs beyond the last point, at least
_CONTEXT_DECAY, _CONTEXT_DOUBT = 0.995, 0.2  # of the fit of g: a step, and weight of g = 0
_INGEST_GAIN = 0.2
OWED_TOKENS = 8  # a drafter that is behind a row by fewer owes it nothing
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
    passes; each depth adds `pass_s`, each token that the drafter catches up on `ingest_s`."""

    step_s: np.ndarray
    pass_s: float
    ingest_s: float = 0.0


class OnlineCostModel:
    """The price list of one executor. It is told of steps and asked for prices, in turn."""

    def __init__(self, profile: CostProfile | None = None, *, max_tokens: int) -> None:
        """`max_tokens` is the most target tokens that a step holds."""
        self._max_tokens = max_tokens
        self._target, self._pass = _Curve(max_tokens), _Curve(max_tokens)
        self._ingest_s = 0.0
        self._slowness = 1.0  # seconds now for a second of the curves
        if profile is not None:
            self._target.slope_s = profile.context_token_s
            table = profile.table(max_tokens).tolist()
            for count in (n for n in profile.tokens if n <= max_tokens):
                extra_s = (profile.logits_token_s + profile.row_s) * count
                self._target.observe(count, table[count] + extra_s, 0)
                drafting_s = profile.draft_pass_s + profile.draft_token_s * count
                self._pass.observe(count, drafting_s, 0)
            self._ingest_s = profile.draft_ingest_s
            self._target.hold_weakly()

    def observe(self, sample: StepSample) -> None:
        """A step took so long. Durations that are not positive were not measured: no evidence."""
        work = sample.work
        if sample.target_s > 0 and work.target_tokens:
            target_s = sample.target_s / self._slowness
            surprise = self._target.observe(work.target_tokens, target_s, work.context_tokens)
            self._slowness *= min(max(surprise, 1 / _SURPRISE), _SURPRISE) ** _SPEED_GAIN
        if sample.draft_s <= 0:
            return
        draft_s, depth = sample.draft_s / self._slowness, work.draft_depth
        if work.ingested_tokens > 2 * work.rows + OWED_TOKENS:
            passes_s = depth * self._pass.at(work.rows)
            ingest_s = max(draft_s - passes_s, 0.0) / work.ingested_tokens
            self._ingest_s += _INGEST_GAIN * (ingest_s - self._ingest_s)
        elif depth:
            self._pass.observe(max(work.draft_tokens / depth, 1.0), draft_s / depth, 0)

    @property
    def is_known(self) -> bool:
        """Whether there is a price at all: a profile's or a step's."""
        return self._target.is_known

    def is_measured(self, target_tokens: int) -> bool:
        """Whether real steps of about so many have been seen: a profile is of another day."""
        return self._target.num_seen_about(target_tokens) > 1

    def prices(
        self, rows: int, base_tokens: int, context_tokens: int, most_drafts: int
    ) -> StepPrices:
        """Prices of a step of `base_tokens` target tokens (one a decoding row, and chunks), `rows`
        decoding rows and 0 to `most_drafts` drafts. Raises IndexError past `max_tokens`."""
        if base_tokens + most_drafts > self._max_tokens:
            raise IndexError(f"{base_tokens} + {most_drafts} tokens, prices are to max_tokens")
        counts = np.arange(base_tokens, base_tokens + most_drafts + 1)
        return StepPrices(
            self._slowness * self._target.over(counts, context_tokens),
            self._slowness * self._pass.at(rows),
            self._slowness * self._ingest_s,
        )


class _Curve:
    """Seconds over a count of at least 1, and over context, by points that follow what is seen."""

    def __init__(self, most: int) -> None:
        size = 1 + self._nearest(most)
        self._seen = [0.0] * size  # steps that a point remembers
        self._points = [(0.0, 0.0, 0.0)] * size  # means of count, seconds and context
        self._known: list[int] = []  # points that have seen some, ascending
        self.slope_s = 0.0  # of a token of context
        self._products = self._squares = 0.0  # of deviations from the point, decayed

    @staticmethod
    def _nearest(count: float) -> int:
        return int(_POINTS * math.log2(count) + 0.5)

    def observe(self, count: float, seconds: float, context: int) -> float:
        """Returns how much longer it took than was expected, as a factor; 1 if nothing was."""
        at, surprise = self._nearest(count), 1.0
        seen, point = self._seen[at], self._points[at]
        if seen:
            expected_s = max(point[1] + self.slope_s * (context - point[2]), _LEAST_S)
            surprise = seconds / expected_s
            seconds = min(seconds, _SURPRISE * expected_s)
            self._observe_context(context, context - point[2], seconds - point[1])
            if surprise < 1 / _SURPRISE:
                seen = 0.0
        else:
            insort(self._known, at)
        self._seen[at] = seen = min(seen + 1, _MEMORY_STEPS)
        x, y, z = point
        self._points[at] = (
            x + (count - x) / seen,
            y + (seconds - y) / seen,
            z + (context - z) / seen,
        )
        return surprise

    @property
    def is_known(self) -> bool:
        return bool(self._known)

    def num_seen_about(self, count: float) -> float:
        """Of its point, or of one beside it."""
        at = self._nearest(count)
        return max(self._seen[max(at - 1, 0) : at + 2])

    def hold_weakly(self) -> None:
        """What has been seen till now is worth one step."""
        self._seen = [min(seen, 1.0) for seen in self._seen]

    def _observe_context(self, context: int, beyond: float, beyond_s: float) -> None:
        """Least squares of seconds on context, both as deviations, relative to the context."""
        if not context:
            return
        scale = 1.0 / (context * context)
        self._products = _CONTEXT_DECAY * self._products + scale * beyond * beyond_s
        self._squares = _CONTEXT_DECAY * self._squares + scale * beyond * beyond
        found_s = self._products / (self._squares + _CONTEXT_DOUBT)
        self.slope_s = max(found_s, 0.0)

    def over(self, counts: np.ndarray, context: int) -> np.ndarray:
        """Seconds, float64, of ascending counts with so much context."""
        if not self._known:
            return np.full(len(counts), _LEAST_S)
        found: np.ndarray = np.interp(counts, *self._levels(float(counts[-1]), context))
        return found

    def at(self, count: int) -> float:
        if not self._known:
            return _LEAST_S
        counts, seconds = self._levels(float(count), 0)
        above = bisect_left(counts, count)
        if above in (0, len(counts)):
            return seconds[min(above, len(counts) - 1)]
        share = (count - counts[above - 1]) / (counts[above] - counts[above - 1])
        return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])

    def _levels(self, end: float, context: int) -> tuple[list[float], list[float]]:
        """Counts, ascending to `end` or beyond, and seconds that never fall."""
        lowest_s, counts, levels_s = math.inf, [], []
        for at in reversed(self._known):
            count, seconds, about = self._points[at]
            lowest_s = max(min(lowest_s, seconds + self.slope_s * (context - about)), _LEAST_S)
            counts.append(count)
            levels_s.append(lowest_s)
        counts.reverse()
        levels_s.reverse()
        last, last_s = counts[-1], levels_s[-1]
        if last < end:
            # On as it rose over the last doubling.
            slope_s, before = _UNTRIED * last_s / last, bisect_right(counts, last / 2) - 1
            if before >= 0:
                slope_s = max(slope_s, (last_s - levels_s[before]) / (last - counts[before]))
            counts.append(end)
            levels_s.append(last_s + slope_s * (end - last))
        return counts, levels_s
