"""What the `goodput` policy goes by, for whoever watches."""

from __future__ import annotations

import msgspec


class SurvivalStats(msgspec.Struct, frozen=True, array_like=True):
    """Drafts by depth, the first depth first: how many were verified in the steps that were looked
    at, how many of these should have survived by what was believed of their rows, and how many
    did."""

    drafted: list[float]
    predicted: list[float]
    survived: list[float]


class Outlook(msgspec.Struct, frozen=True, array_like=True):
    """`drafting`: whether anybody may. The rest is of the last decision, and None where it was that
    nobody drafts: `price`, the policy's lambda and no time, is the least chance of survival
    (weighted, see draft_allocation.py) that was worth a draft; `tokens_per_s` is what the step was
    expected to commit in a second, `gain` the same over drafting nothing, less 1."""

    drafting: bool
    price: float | None
    tokens_per_s: float | None
    gain: float | None
    calibration: SurvivalStats
