"""The duration of a step, learned from committed steps, and how many prompt tokens it may hold.

    T(n) + s * pairs

n tokens go through the model in a step, of prompts, decodes and drafts; `pairs` counts the
(query, key) pairs of its attention. Durations are wall time: what the executor measured, and the
host's part of the turn. While rows decode, a step takes as few prompt tokens as read prompts at
nearly the best speed, so that the rows' next tokens do not wait for longer than that needs.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.speculation.step_curve import StepCurve

# Of the best prompt throughput, what a step keeps while answers stream.
PROMPT_SHARE = 0.8
PLAIN_EVERY = 16  # of the steps without prompts one in so many is observed
# Prompt tokens next to decoding rows until larger steps were measured: no more than twice those.
_FIRST_CHUNK, _GROWTH = 64, 2
_SETTLED = 3  # steps of about a size, before it counts as measured: the first takes longer
_LEAST_CHUNK = 8  # prompt tokens that a step takes whatever its target: prompts must go on
# A step is planned to take this share of its target. The share falls after a step that took longer
# and rises after each that did not, so that one step of two hundred takes longer.
_FIRST_MARGIN, _MARGIN_FALL, _MARGIN_RISE = 0.85, 0.04, 0.0002
_LEAST_MARGIN = 0.4


class StepCosts:
    """Observe steps by `observe`; every method is a function of what was observed."""

    def __init__(self, max_tokens: int, prompt_share: float = PROMPT_SHARE) -> None:
        """`max_tokens`: the most tokens of a step; `prompt_share`: of the prompt throughput of the
        best chunk, what the chosen one keeps (1: the whole budget is taken)."""
        self._prompt_share = prompt_share
        self._curve = StepCurve(max_tokens, fits_slope=True)
        sizes = _LEAST_CHUNK * 2 ** (np.arange(80) / 4)  # four sizes per doubling
        self._sizes = np.append(sizes[sizes < max_tokens].astype(np.int64), max_tokens)
        self._has_prompts = False
        self._most_tokens = 0  # of a size that was measured
        self._margin = _FIRST_MARGIN

    @property
    def is_known(self) -> bool:
        """True once a step had a duration."""
        return bool(self._curve.known)

    def observe(self, tokens: int, pairs: int, seconds: float, *, has_prompts: bool) -> None:
        """Take in a step. Durations that are not positive were not measured."""
        if seconds > 0 and tokens > 0:
            self._curve.observe(tokens, seconds, pairs)
            self._has_prompts |= has_prompts
            if self._curve.num_seen_about(tokens) >= _SETTLED:
                self._most_tokens = max(self._most_tokens, tokens)

    def observe_target(self, target_s: float, seconds: float) -> None:
        """Take in whether a step with decoding rows kept their target."""
        change = -_MARGIN_FALL if seconds > target_s else _MARGIN_RISE
        self._margin = min(max(self._margin + change, _LEAST_MARGIN), 1.0)

    def prompt_tokens(self, most: int) -> int:
        """Return the fewest prompt tokens of a step, at most `most`, that keep the share of the
        prompt throughput n / T(n) of the best n. Without prices that is `most`."""
        if self._prompt_share == 1 or not self.is_known:
            return most
        speeds = self._sizes / self._curve.over(self._sizes, 0)
        best = int(np.argmax(speeds >= self._prompt_share * speeds.max()))
        measured = max(_GROWTH * self._most_tokens, _FIRST_CHUNK)
        return min(int(self._sizes[best]), measured, most)

    def tokens_within(self, target_s: float, rows: int, pairs: int, context_tokens: int) -> int:
        """Return how many tokens fit a step within `target_s` besides those of `rows` decoding
        rows with `pairs`; each new one attends to `context_tokens`. Without prices all fit."""
        if not self.is_known:
            return int(self._sizes[-1])
        more_s = self._curve.slope_s * self._sizes * (context_tokens + self._sizes / 2)
        step_s = self._curve.over(rows + self._sizes, pairs) + more_s
        fitting = np.count_nonzero(step_s <= self._margin * target_s)
        return int(self._sizes[fitting - 1]) if fitting else 0

    def chunk(self, rows: int, pairs: int, context_tokens: int, target_s: float | None) -> int:
        """Return the prompt tokens of a step in which `rows` rows decode, with `pairs`: as
        `prompt_tokens`, and no more than keep it within `target_s`."""
        chosen = self.prompt_tokens(int(self._sizes[-1]))
        if target_s is None:
            return chosen
        fitting = self.tokens_within(target_s, rows, pairs, context_tokens)
        return min(chosen, max(fitting, _LEAST_CHUNK))

    def prompt_token_s(self, rows: int, budget_tokens: int) -> float:
        """Return the estimated seconds per prompt token, at the contexts that were usual lately,
        while `rows` rows decode; 0 without prices."""
        if not self._has_prompts:
            return 0.0
        chunk = min(self.prompt_tokens(budget_tokens), budget_tokens) if rows else budget_tokens
        return self._curve.usual_s(min(rows + chunk, int(self._sizes[-1]))) / chunk
