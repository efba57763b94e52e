"""The duration of a step, learned from committed steps, and the prompt tokens that a step takes.

    duration = T(n) + s * pairs

n is the number of tokens in the step: prompts, decodes and drafts. `pairs` is the number of
(query, key) pairs of its attention. Durations are wall time, the host's part included. While rows
decode, a step takes the fewest prompt tokens that keep nearly the best prompt throughput. The
decoding rows then wait no longer than necessary for their next tokens.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.prices.step_curve import StepCurve

# Share of the best prompt throughput that steps keep while rows decode.
PROMPT_SHARE = 0.8
PLAIN_EVERY = 16  # every 16th step without prompts is observed
# While rows decode, a chunk has at most `_FIRST_CHUNK_TOKENS`, or `_GROWTH` times the tokens of the
# largest measured step if this is more.
_FIRST_CHUNK_TOKENS, _GROWTH = 64, 2
_MIN_STEPS_PER_SIZE = 3  # steps before their size counts as measured: the first is slower
_MIN_CHUNK_TOKENS = 8  # prompt tokens of a step whatever its target, so that prompts progress
# A step is planned to take this share (margin) of the target time between two tokens. The share
# falls after a step longer than the target, and rises after a shorter one: in equilibrium one step
# in two hundred is too long. Each target has its own, so that clients with short ones change no
# other.
_FIRST_MARGIN, _MARGIN_FALL, _MARGIN_RISE = 0.85, 0.04, 0.0002
_MIN_MARGIN = 0.4
_MAX_TARGETS = 16  # targets that have margins of their own


class StepCosts:
    """Cost model of steps. Estimates are functions of the observed steps alone."""

    def __init__(self, max_tokens: int, prompt_share: float = PROMPT_SHARE) -> None:
        """`max_tokens`: most tokens of a step. `prompt_share`: share of the best prompt throughput
        that a chunk keeps; 1: chunks take the whole budget."""
        self._prompt_share = prompt_share
        self._curve = StepCurve(max_tokens, fits_slope=True)
        sizes = _MIN_CHUNK_TOKENS * 2 ** (np.arange(80) / 4)  # four sizes per doubling
        self._sizes = np.append(sizes[sizes < max_tokens].astype(np.int64), max_tokens)
        self._has_prompts = False
        self._max_measured = 0  # tokens of the largest measured step
        self._margins: dict[float, float] = {}  # by target, last observed last

    @property
    def is_known(self) -> bool:
        """True once a duration was observed."""
        return bool(self._curve.known)

    def observe(self, tokens: int, pairs: int, seconds: float, *, has_prompts: bool) -> None:
        """Observe a step by its tokens and query-key pairs. A duration of 0 is ignored."""
        if seconds > 0 and tokens > 0:
            self._curve.observe(tokens, seconds, pairs)
            self._has_prompts |= has_prompts
            if self._curve.num_steps_near(tokens) >= _MIN_STEPS_PER_SIZE:
                self._max_measured = max(self._max_measured, tokens)

    def observe_target(
        self, target_s: float, seconds: float, rows: int = 0, pairs_per_token: float = 0.0
    ) -> None:
        """Observe the duration of a step with `rows` rows, whose target was `target_s`. A miss
        teaches nothing if even the shortest step of these rows would have missed."""
        if seconds > target_s and self.is_known:
            tokens = rows + _MIN_CHUNK_TOKENS
            if self._curve.seconds_at(tokens, tokens * pairs_per_token) > target_s:
                return
        change = -_MARGIN_FALL if seconds > target_s else _MARGIN_RISE
        margin = min(max(self._margin(target_s) + change, _MIN_MARGIN), 1.0)
        self._margins.pop(target_s, None)
        self._margins[target_s] = margin
        if len(self._margins) > _MAX_TARGETS:
            del self._margins[next(iter(self._margins))]

    def _margin(self, target_s: float) -> float:
        return self._margins.get(target_s, _FIRST_MARGIN)

    def prompt_tokens(self, budget_tokens: int) -> int:
        """Return the fewest prompt tokens, at most the budget, whose throughput n / T(n) is at
        least `prompt_share` of the best. Without observations, return the budget."""
        if self._prompt_share == 1 or not self.is_known:
            return budget_tokens
        speeds = self._sizes / self._curve.seconds_at(self._sizes, 0)
        smallest = int(np.argmax(speeds >= self._prompt_share * speeds.max()))
        max_chunk = max(_GROWTH * self._max_measured, _FIRST_CHUNK_TOKENS)
        return min(int(self._sizes[smallest]), max_chunk, budget_tokens)

    def tokens_within(self, target_s: float, rows: int, pairs: int, context_tokens: int) -> int:
        """Return the tokens that can be added to a step within `target_s`. The step has `rows`
        decoding tokens with `pairs` pairs; an added token attends to `context_tokens`. Without
        observations, return the most tokens of a step."""
        if not self.is_known:
            return int(self._sizes[-1])
        attention_s = self._curve.slope_s * self._sizes * (context_tokens + self._sizes / 2)
        step_s = self._curve.seconds_at(rows + self._sizes, pairs) + attention_s
        fitting = np.count_nonzero(step_s <= self._margin(target_s) * target_s)
        return int(self._sizes[fitting - 1]) if fitting else 0

    def chunk(self, rows: int, pairs: int, context_tokens: int, target_s: float | None) -> int:
        """Return the prompt tokens of a step with `rows` decoding tokens and `pairs` pairs: the
        result of `prompt_tokens`, or what fits in `target_s`, but at least `_MIN_CHUNK_TOKENS`."""
        chosen = self.prompt_tokens(int(self._sizes[-1]))
        if target_s is None:
            return chosen
        fitting = self.tokens_within(target_s, rows, pairs, context_tokens)
        return min(chosen, max(fitting, _MIN_CHUNK_TOKENS))

    def prompt_token_s(self, rows: int, budget_tokens: int) -> float:
        """Return the estimated seconds per prompt token while `rows` rows decode, at recent context
        lengths; 0 without observations."""
        if not self._has_prompts:
            return 0.0
        chunk = min(self.prompt_tokens(budget_tokens), budget_tokens) if rows else budget_tokens
        return self._curve.typical_s(min(rows + chunk, int(self._sizes[-1]))) / chunk
