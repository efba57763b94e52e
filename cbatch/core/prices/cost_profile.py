"""What steps take on a machine, as measured at start-up: what a price list begins with."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError


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
