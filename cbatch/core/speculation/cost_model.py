"""What a step costs: read off the durations of real steps, from a profile of the machine onwards.

    target_s = T(n) + g * context          draft_s = s + depth * P(rows) + i * ingested

n tokens go through the target model, drafts among them; drafting takes `depth` sequential passes,
and s, which is the profile's, if it is done at all; `ingested` are tokens that the drafter had not
seen and catches up on.

T and P are curves through points, a few to a doubling of n: what was measured lately about there.
Nothing is assumed of their shape but that they do not fall. Steps only ever get longer by what else
a machine does: of a duration far above what was expected part is believed, one far below at once,
and no point lies above those to its right that were seen as often (one seen less often gives way:
it may be of another day). Without a profile more tokens look cheap until they are tried.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import accumulate

import msgspec
import numpy as np

from cbatch.core.speculation.cost_profile import CostProfile
from cbatch.core.speculation.step_work import StepSample

_POINTS = 2  # to a doubling
_MEMORY_STEPS = 24.0  # of a point
_SURPRISE = 1.5  # times what was expected, or its inverse: a stall, or news
_UNTRIED = 0.1  # of a token's share of a step: what each costs beyond the last point, at least
OWED_TOKENS = 8  # a drafter that is behind a row by fewer owes it nothing
_LEAST_S = 1e-9  # what a step costs as long as nothing at all is known


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
            self._ingest_s += (ingest_s - self._ingest_s) / _MEMORY_STEPS
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


class _Curve:
    """Seconds over a count of at least 1, and over context, by points that follow what is seen."""

    def __init__(self, most: int) -> None:
        self._most, size = most, 1 + self._nearest(most)
        self._seen = [0.0] * size  # steps that a point remembers
        self._points = [(0.0, 0.0, 0.0)] * size  # means of count, seconds and context
        self.known: list[int] = []  # points that have seen some, ascending
        self.slope_s = 0.0  # of a token of context

    @staticmethod
    def _nearest(count: float) -> int:
        return int(_POINTS * math.log2(count) + 0.5)

    def observe(self, count: float, seconds: float, context: int) -> None:
        at = self._nearest(count)
        seen, point = self._seen[at], self._points[at]
        if seen:
            expected_s = max(point[1] + self.slope_s * (context - point[2]), _LEAST_S)
            if seconds < expected_s / _SURPRISE:
                seen = 0.0
            seconds = min(seconds, _SURPRISE * expected_s)
        else:
            insort(self.known, at)
        self._seen[at] = seen = min(seen + 1, _MEMORY_STEPS)
        x, y, z = point
        self._points[at] = (
            x + (count - x) / seen,
            y + (seconds - y) / seen,
            z + (context - z) / seen,
        )

    def num_seen_about(self, count: float) -> float:
        """Of its point, or of one beside it."""
        at = self._nearest(count)
        return max(self._seen[max(at - 1, 0) : at + 2])

    def hold_weakly(self) -> None:
        """What has been seen till now is worth one step."""
        self._seen = [min(seen, 1.0) for seen in self._seen]

    def over(self, counts: np.ndarray | int, context: int) -> np.ndarray:
        """Seconds, float64, of so many each, with so much context."""
        found = np.interp(counts, *self._levels(context)) if self.known else 0.0 * counts
        return np.maximum(found, _LEAST_S)

    def _levels(self, context: int) -> tuple[list[float], list[float]]:
        """Counts, ascending to the most there can be, and seconds that never fall."""
        lowest_s, often, counts, levels_s = math.inf, 0.0, [], []
        for at in reversed(self.known):
            count, seconds, about = self._points[at]
            level_s = seconds + self.slope_s * (context - about)
            if level_s <= lowest_s or self._seen[at] > often:
                lowest_s, often = level_s, self._seen[at]
            counts.append(count)
            levels_s.append(lowest_s)
        counts.reverse()
        levels_s = list(accumulate(reversed(levels_s), max))
        last, before = counts[-1], bisect_right(counts, counts[-1] / 2) - 1
        if last < self._most:  # on as it rose over the last doubling
            slope_s = _UNTRIED * levels_s[-1] / last
            if before >= 0:
                slope_s = max(slope_s, (levels_s[-1] - levels_s[before]) / (last - counts[before]))
            counts.append(self._most)
            levels_s.append(levels_s[-1] + slope_s * (self._most - last))
        return counts, levels_s
