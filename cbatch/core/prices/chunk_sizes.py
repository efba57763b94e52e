"""The prompt tokens of a step while rows decode.

A chunk is the smallest that keeps a share of the best prompt throughput, so that decoding rows wait
no longer than necessary for their next tokens. Where the prices do not tell whether a smaller chunk
is slower, it is taken. A chunk changes only if the best one is another by `_HYSTERESIS`. The step
takes at most `MAX_STRETCH` times as long as without the chunk, unless prompts would lose a further
1 - share significantly. Targets for the gap between tokens limit chunks further.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample, StepWork

# Share of the best prompt throughput that steps keep while rows decode.
PROMPT_SHARE = 0.8
# The first chunks have at most `_FIRST_TOKENS`, later ones `_GROWTH` times those of the largest.
_FIRST_TOKENS, _GROWTH = 64, 2
_MIN_TOKENS = 8  # prompt tokens of a step whatever its target, so that prompts progress
MAX_STRETCH = 3.0
_HYSTERESIS = 1.25
_MAX_TIE = 0.03  # relative difference of speeds that is never a tie
_MEMORY = 32  # chunks over which their mean context is averaged
# A step is planned to take this share (margin) of the target time between two tokens. The share
# falls after a step longer than the target, and rises after a shorter one: in equilibrium one step
# in two hundred is too long. Each target has its own, so that clients with short ones change no
# other.
_FIRST_MARGIN, _MARGIN_FALL, _MARGIN_RISE = 0.85, 0.04, 0.0002
_MIN_MARGIN = 0.4
_MAX_TARGETS = 16  # targets that have margins of their own


class ChunkSizes:
    """Chooses chunks by the prices of steps."""

    def __init__(self, costs: StepCosts, max_tokens: int, prompt_share: float) -> None:
        """`max_tokens`: most tokens of a step. `prompt_share`: share of the best prompt throughput
        that a chunk keeps; 1: chunks take the whole budget."""
        self._costs, self._share = costs, prompt_share
        sizes = _MIN_TOKENS * 2 ** (np.arange(160) / 8)  # eight sizes per doubling
        self._sizes = np.unique(np.append(sizes[sizes < max_tokens].astype(np.int64), max_tokens))
        self._max_tokens = max_tokens
        self.last = self._max_measured = 0  # tokens of the last chosen chunk, and of the largest
        self._history = 0.0  # mean context of a chunk's tokens, of recent chunks
        self._margins: dict[float, float] = {}  # by target, last observed last

    def observe(self, sample: StepSample, target_s: float | None) -> None:
        """Observe a committed step, whose rows have this target."""
        work, seconds = sample.work, sample.draft_s + sample.rest_s
        if work.prefill_tokens:
            self._max_measured = max(self._max_measured, work.prefill_tokens)
            history = work.prefill_pairs / work.prefill_tokens
            self._history += (history - self._history) / _MEMORY
        if target_s is None or seconds <= 0:
            return
        # A miss teaches nothing if even the shortest step of these rows would have missed.
        missed = seconds > target_s
        if missed and self._costs.is_known and not self._within(target_s, work.plain):
            return
        change = -_MARGIN_FALL if missed else _MARGIN_RISE
        margin = min(max(self._margin(target_s) + change, _MIN_MARGIN), 1.0)
        self._margins.pop(target_s, None)
        self._margins[target_s] = margin
        if len(self._margins) > _MAX_TARGETS:
            del self._margins[next(iter(self._margins))]

    def _margin(self, target_s: float) -> float:
        return self._margins.get(target_s, _FIRST_MARGIN)

    def _within(self, limit_s: float, work: StepWork, history: int = 0) -> int:
        """Return the largest chunk with which the step `work` takes at most `limit_s`, or 0."""
        seconds, _ = self._costs.with_chunks(work, self._sizes, history)
        fitting = int(np.count_nonzero(seconds <= limit_s))
        return int(self._sizes[fitting - 1]) if fitting else 0

    def tokens_within(self, target_s: float, work: StepWork, history: int = 0) -> int:
        """Return the tokens that can be added to the step `work` within `target_s`, each after
        `history` tokens. Before a step was observed, return the most tokens of a step."""
        if not self._costs.is_known:
            return self._max_tokens
        limit_s = self._margin(target_s) * target_s - self._costs.draft_s(work)
        return self._within(limit_s, work, history)

    def chunk(self, work: StepWork, history: int, target_s: float | None) -> int:
        """Return the prompt tokens to be added to `work`, a step of decoding rows, after `history`
        tokens of the prompt; at least `_MIN_TOKENS`."""
        chosen = self._chosen(work)
        if target_s is None:
            return chosen
        return min(chosen, max(self.tokens_within(target_s, work, history), _MIN_TOKENS))

    def _chosen(self, work: StepWork) -> int:
        if self._share >= 1:
            return self._max_tokens
        max_chunk = max(_GROWTH * self._max_measured, _FIRST_TOKENS)
        if not self._costs.is_known:
            return min(max_chunk, self._max_tokens)
        best = self._best(work.plain)
        if not self.last / _HYSTERESIS <= best <= self.last * _HYSTERESIS:
            self.last = best
        return min(self.last, max_chunk, self._max_tokens)

    def _best(self, work: StepWork) -> int:
        """Return the chunk that keeps the share of the best prompt throughput beside `work`."""
        sizes, share = self._sizes, self._share
        seconds, shares = self._costs.with_chunks(work, sizes, int(self._history))
        speeds = sizes / seconds
        fastest = int(np.argmax(speeds))
        errors = np.sqrt(self._costs.variances(shares - shares[fastest]))
        enough = speeds >= share * speeds[fastest] * (1 - np.minimum(errors, _MAX_TIE))
        smallest = int(np.argmax(enough))
        alone_s = float(self._costs.with_chunks(work, np.zeros(1), 0)[0][0])
        capped = max(int(np.count_nonzero(seconds <= MAX_STRETCH * alone_s)) - 1, 0)
        if capped < smallest:
            error = float(self._costs.variances(shares[[capped]] - shares[smallest])[0]) ** 0.5
            loss = np.log(speeds[smallest] / speeds[capped])
            smallest = smallest if loss > error - np.log(share) else capped
        return int(sizes[smallest])

    def prompt_token_s(self, work: StepWork, budget_tokens: int) -> float:
        """Return the estimated seconds per prompt token beside the decoding rows `work`, at recent
        context lengths; 0 before prompts were observed."""
        if not (self._max_measured and self._costs.is_known):
            return 0.0
        chunk = min(self._chosen(work), budget_tokens) if work.rows else budget_tokens
        history = max(self._history - chunk / 2, 0.0)
        seconds, _ = self._costs.with_chunks(work, np.array([chunk]), int(history))
        return float(seconds[0]) / chunk
