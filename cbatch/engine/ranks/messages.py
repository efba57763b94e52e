"""Messages between rank 0 and the other ranks.

Rank 0 sends `Start`, then `Probe` and `Serve`, then plans and `Reset`. The others answer `READY`,
then `LOADED`, and each plan with its result's `digest`.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.backend import LoadRequest

READY, LOADED = "ready", "loaded"


class Start(msgspec.Struct, frozen=True):
    """A rank's number and the models that it loads. The ranks connect by files in `folder`.
    `tokenizer` is the engine's option."""

    rank: int
    size: int
    folder: Path
    threads: int
    request: LoadRequest
    tokenizer: str | None


class Probe(msgspec.Struct, frozen=True):
    """Run the passes that test for batch invariance, which need all ranks."""


class Serve(msgspec.Struct, frozen=True):
    """Create the executor."""

    config: SchedulerConfig


class Reset(msgspec.Struct, frozen=True):
    """Reset the executor."""


Message = Start | Probe | Serve | Reset | StepPlan


def digest(result: StepResult) -> tuple[int, int]:
    """Return the step id and a checksum of the result, which must be equal in all ranks."""
    checksum = 0
    for part in (
        result.tokens,
        result.row_splits,
        result.num_drafted,
        result.num_accepted,
        result.status,
    ):
        checksum = zlib.crc32(part.tobytes(), checksum)
    return result.step_id, checksum
