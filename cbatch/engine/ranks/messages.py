"""What rank 0 tells the others: first `Start`, once `Probe`, before any plan `Serve`; between plans
`Reset`. They answer `READY`, then `LOADED`, and to each plan its `digest`."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.engine.heads import TrialTexts
from cbatch.engine.model_impl import Impl
from cbatch.engine.options import EngineOptions

READY, LOADED = "ready", "loaded"


class RankFiles(msgspec.Struct, frozen=True):
    """`impls`: whose modelling code computes the model, and the draft. `trial_texts` are those of a
    draft that is a head, and else empty."""

    model: str | Path
    draft: str | Path | None
    impls: tuple[Impl, Impl]
    trial_texts: TrialTexts


class Start(msgspec.Struct, frozen=True):
    """Who it is, and what it loads. `folder`: where ranks find each other."""

    rank: int
    size: int
    folder: Path
    threads: int
    files: RankFiles
    options: EngineOptions


class Probe(msgspec.Struct, frozen=True):
    """Whether a row's bits are its own is found out by passes that all ranks make."""


class Serve(msgspec.Struct, frozen=True):
    config: SchedulerConfig


class Reset(msgspec.Struct, frozen=True):
    """Every slot is forgotten."""


Message = Start | Probe | Serve | Reset | StepPlan


def digest(result: StepResult) -> tuple[int, int]:
    """Of a step, what all ranks must agree about: they come to it by themselves."""
    found = 0
    for part in (
        result.tokens,
        result.row_splits,
        result.num_drafted,
        result.num_accepted,
        result.status,
    ):
        found = zlib.crc32(part.tobytes(), found)
    return result.step_id, found
