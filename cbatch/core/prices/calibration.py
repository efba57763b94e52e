"""The document that `cbatch calibrate` writes and `cbatch sim --cost` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError

FORMAT, VERSION = "cbatch-calibration", 6


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predicted durations of whole steps, relative to the measured ones."""

    steps: int
    total: float  # sum of predictions / sum of measurements - 1
    p50: float  # median of the steps' absolute relative errors
    p90: float  # 90th percentile of these errors


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of an engine's steps, a description of that engine, and the errors of the prices."""

    model: str
    draft: str | None
    machine: dict[str, Any]
    versions: dict[str, str]
    engine: dict[str, Any]  # fields of the scheduler's configuration
    prices: CostProfile
    profile: CostProfile | None  # first prices of an engine's steps, measured at start-up
    max_rows: int  # most rows of a measured step
    fitted: Accuracy  # on the steps that the prices were fitted to
    held_out: Accuracy  # on steps of other compositions
    format: str = FORMAT
    version: int = VERSION


def decode_calibration(document: bytes) -> Calibration:
    """Return the calibration in a JSON document. Raises `FieldError` for another version, and
    `msgspec.MsgspecError` for a document that is not a cost profile."""
    header = msgspec.json.decode(document, type=_Header)
    if header.format == FORMAT and header.version != VERSION:
        problem = f"is of version {header.version}, not {VERSION}"
        raise FieldError("calibration", problem, "calibrate again with this version of cbatch")
    return msgspec.json.decode(document, type=Calibration)


def accuracy(prices: CostProfile, samples: Sequence[StepSample]) -> Accuracy:
    """Return how well the prices predict `draft_s + target_s + host_s` of the samples."""
    predicted = np.array([sum(prices.step_s(s.work)) for s in samples])
    measured = np.array([s.draft_s + s.target_s + s.host_s for s in samples])
    p50, p90 = np.percentile(np.abs(predicted / measured - 1), (50, 90)).tolist()
    total = float(predicted.sum() / measured.sum() - 1)
    return Accuracy(steps=len(samples), total=total, p50=p50, p90=p90)
