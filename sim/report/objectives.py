"""Objectives of latency, read from text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cbatch.core.request.errors import FieldError

if TYPE_CHECKING:
    from sim.report.report import Objectives


def parse_objectives(texts: tuple[str, ...]) -> Objectives | None:
    from sim.report.report import Objectives

    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            given[f"{name}_s"] = seconds = float(value)
        except ValueError:
            seconds = math.nan
        if name not in ("ttft", "tpot", "e2e") or not 0 < seconds < math.inf:
            raise FieldError(
                "--slo", f"{text!r} is not known", "write ttft=0.5, tpot=... or e2e=..."
            )
    return Objectives(**given) if given else None
