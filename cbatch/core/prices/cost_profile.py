"""Prices of a machine's steps, measured at start-up, or more completely by `cbatch calibrate`."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from cbatch.core.prices.curve import Curve
from cbatch.core.request.errors import FieldError


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Prices in seconds; serialisable. `terms.py` says what each price is multiplied with.

        target_s = T(target tokens) + C(context of decoding rows) + W(idle time) + prices * terms
        draft_s = prices * terms                      host_s = prices * terms

    T, C and W are piecewise linear. T and C continue beyond their last points, W is constant there.
    A staircase (captured graphs, padded rows) has two points per stair. The measurement at start-up
    determines T and the first eight prices; `cbatch calibrate` determines all prices but
    `context_token_s`, which C replaces.
    """

    tokens: tuple[int, ...]  # points of T, ascending
    target_s: tuple[float, ...]  # T, with little context; made non-decreasing by `target_curve`
    logits_token_s: float = 0.0  # beyond T, per token that needs logits
    context_token_s: float = 0.0
    verify_context_token_s: float = 0.0  # beyond C, per decoding context token if a row drafts
    row_s: float = 0.0
    draft_setup_s: float = 0.0  # per step that drafts, at any depth
    draft_pass_s: float = 0.0
    draft_token_s: float = 0.0
    draft_ingest_s: float = 0.0  # per token that the drafter catches up on
    contexts: tuple[int, ...] = (0, 1)  # points of C, ascending
    context_s: tuple[float, ...] = (0.0, 0.0)
    idles_s: tuple[float, ...] = (0.0, 1.0)  # points of W, ascending
    after_idle_s: tuple[float, ...] = (0.0, 0.0)
    further: dict[str, float] = {}  # prices of the other terms, by name

    def price(self, term: str) -> float:
        """Return the price of a term of `terms.py` in seconds; 0 if it was not measured."""
        price: float = self.further[term] if term in self.further else getattr(self, term, 0.0)
        return price

    def __post_init__(self) -> None:
        curves = ((self.contexts, self.context_s), (self.idles_s, self.after_idle_s))
        prices = [s for s in msgspec.structs.astuple(self) if isinstance(s, float)]
        prices += self.further.values()
        for field, ok, remedy in (
            ("tokens", len(self.tokens) >= 2, "give at least two points"),
            ("tokens", _ascend(self.tokens) and self.tokens[0] >= 1, "give ascending counts"),
            ("target_s", len(self.target_s) == len(self.tokens), "give one duration per count"),
            ("target_s", all(0 < s < math.inf for s in self.target_s), "give positive seconds"),
            ("slopes", all(0 <= s < math.inf for s in prices), "give seconds of 0 or more"),
            ("curves", all(_is_curve(*curve) for curve in curves), "give ascending points"),
        ):
            if not ok:
                raise FieldError(f"cost_profile.{field}", "is not a profile", remedy)

    def target_curve(self) -> Curve:
        """Return T, made non-decreasing."""
        return Curve(self.tokens, np.maximum.accumulate(self.target_s).tolist())

    def table(self, max_tokens: int) -> np.ndarray:
        """Return T(0) to T(max_tokens), float64."""
        curve = self.target_curve()
        return np.array([curve(count) for count in range(max_tokens + 1)])


def _ascend(values: tuple[float, ...]) -> bool:
    return all(a < b for a, b in zip(values, values[1:], strict=False))


def _is_curve(points: tuple[float, ...], seconds: tuple[float, ...]) -> bool:
    rises = all(0 <= a <= b < math.inf for a, b in zip(seconds, seconds[1:], strict=False))
    return _ascend(points) and rises and len(points) == len(seconds) >= 2
