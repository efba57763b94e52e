"""A step that is queued on the device and whose result has not been read yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cbatch.core.scheduler.plan import StepPlan
from cbatch.runtime.gpu.device import QueueEvent
from cbatch.runtime.gpu.host_drafts import DraftPlan
from cbatch.runtime.gpu.slots import Bounds


class HostBuffers:
    """Pinned host memory of one pending step. Each pending step has its own, because the next
    step's message is written while the previous step still runs."""

    def __init__(self) -> None:
        empty = torch.zeros(0, dtype=torch.int32)
        self.message = self.result = self.drafts = self.masks = empty


@dataclass
class Pending:
    """A pending step. `decided`: verification and sampling are queued too. With a grammar they are
    queued only after the previous step's result, since the token mask depends on its tokens."""

    plan: StepPlan
    draft_plan: DraftPlan
    bounds: Bounds
    buffers: HostBuffers
    started: QueueEvent
    drafting: tuple[QueueEvent, QueueEvent] | None  # start and end; None if no row drafts
    decided: bool = False
    done: QueueEvent = field(default_factory=QueueEvent)
    logprobs: tuple[Any, ...] = ()  # returned by `LogprobsReader.queue`
    dead_ends: dict[int, int] = field(default_factory=dict)  # see `Masks`

    @property
    def durations_s(self) -> tuple[float, float]:
        """Device time of drafting and of the rest of the step, in seconds, including gaps in which
        the device waited for the host."""
        draft_s = 0.0
        if self.drafting is not None:
            start, end = self.drafting
            draft_s = end.seconds_since(start)
        return draft_s, self.done.seconds_since(self.started) - draft_s
