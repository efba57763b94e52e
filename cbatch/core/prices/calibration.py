"""The document that `cbatch calibrate` writes and `cbatch sim --cost` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.prices.terms import ProfiledCost
from cbatch.core.request.errors import FieldError

FORMAT, VERSION = "cbatch-calibration", 5


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted durations of whole steps against measured ones."""

    steps: int
    total: float  # predicted / measured - 1, of all steps together
    p50: float  # of absolute relative errors of single steps
    p90: float


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of an engine's steps, the engine, and how well the prices predict."""

    model: str
    draft: str | None
    machine: dict[str, Any]
    versions: dict[str, str]
    engine: dict[str, Any]  # fields of the scheduler's configuration
    prices: CostProfile
    profile: CostProfile | None  # measured at start-up: the adaptive policy begins with it
    max_rows: int  # in one measured step; with more tokens than measured the last line continues
    fitted: Accuracy
    held_out: Accuracy  # on compositions that nothing was fitted to
    format: str = FORMAT
    version: int = VERSION


def decode_calibration(document: bytes) -> Calibration:
    """Raises `FieldError` or `msgspec.MsgspecError` if it is not one, or of another version."""
    header = msgspec.json.decode(document, type=_Header)
    if header.format == FORMAT and header.version != VERSION:
        problem = f"is of version {header.version}, not {VERSION}"
        raise FieldError("calibration", problem, "calibrate again with this version of cbatch")
    return msgspec.json.decode(document, type=Calibration)


def accuracy(prices: CostProfile, samples: Sequence[StepSample]) -> Accuracy:
    costs = [ProfiledCost(prices, controlled=controlled) for controlled in (False, True)]
    predicted = np.array([sum(costs[s.controlled].step_s(s.work)) for s in samples])
    measured = np.array([s.draft_s + s.target_s + s.host_s for s in samples])
    p50, p90 = np.percentile(np.abs(predicted / measured - 1), (50, 90)).tolist()
    total = float(predicted.sum() / measured.sum() - 1)
    return Accuracy(steps=len(samples), total=total, p50=p50, p90=p90)
