"""Prices of a machine's steps: ten terms, measured at start-up or by `cbatch calibrate`."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
import numpy as np

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError

MAX_CORNER = 8.0  # a sharp corner
Seconds = TypeVar("Seconds", float, np.ndarray)


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Prices in seconds; serialisable. The duration of a step is T + s * pairs + drafting:

        T = (base_s ^ corner + (token_s * tokens) ^ corner) ^ (1 / corner)
            + logit_s * logits + context_s * context + chunk_s [chunks] + verify_s [drafts]
        s * pairs = pair_s * pairs
        drafting = draft_pass_s * depth + draft_token_s * (drafts + catch-up tokens)

    `base_s` is what tokens do not change: reading the weights, launches, and the host's work. At
    overlap depth 1 it is the host's or the device's part, whichever is longer. With `corner` 1 a
    token always costs the same. A large `corner` is a sharp corner: up to base_s / token_s tokens
    cost nothing, because the device, limited by its memory, computes meanwhile."""

    base_s: float
    token_s: float = 0.0  # per target token: of a prompt, decoded, or a draft
    corner: float = 1.0
    logit_s: float = 0.0  # per token that needs logits
    context_s: float = 0.0  # per KV position that a row reads
    pair_s: float = 0.0  # per query-key pair
    chunk_s: float = 0.0  # per step with chunks of prompts
    verify_s: float = 0.0  # per step with drafts
    draft_pass_s: float = 0.0  # per sequential pass of the drafter
    draft_token_s: float = 0.0  # per token that the drafter drafts or catches up on

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            price, least = getattr(self, name), 1.0 if name == "corner" else 0.0
            if not least <= price < math.inf or (name == "base_s" and price <= 0):
                problem = f"{price!r} is not a price"
                raise FieldError(f"cost_profile.{name}", problem, "give seconds of 0 or more")
        if self.corner > MAX_CORNER:
            problem = f"{self.corner!r} is too sharp a corner"
            raise FieldError("cost_profile.corner", problem, f"give 1 to {MAX_CORNER:g}")

    def step_s(self, work: StepWork) -> tuple[float, float, float]:
        """Return the predicted `draft_s`, `target_s` and `host_s` of a step. The host's part is in
        `target_s`."""
        target_s = (
            corner_s(self.base_s, self.token_s * work.target_tokens, self.corner)
            + self.logit_s * work.logit_tokens
            + self.context_s * work.context_tokens
            + self.pair_s * work.pairs
        )
        if work.prefill_tokens:
            target_s += self.chunk_s
        if not (work.draft_depth or work.ingested_tokens):
            return 0.0, target_s, 0.0
        tokens = work.draft_tokens + work.ingested_tokens
        draft_s = self.draft_pass_s * work.draft_depth + self.draft_token_s * tokens
        return draft_s, target_s + self.verify_s * (work.draft_tokens > 0), 0.0


def corner_s(base_s: float, tokens_s: Seconds, corner: float) -> Seconds:
    """Return the smooth maximum of two durations; their sum if `corner` is 1."""
    result: Seconds = (base_s**corner + tokens_s**corner) ** (1 / corner)
    return result
