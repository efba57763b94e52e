"""A step that was queued and not waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cbatch.core.scheduler.plan import StepPlan
from cbatch.runtime.gpu.device import Mark
from cbatch.runtime.gpu.host_drafts import Asks
from cbatch.runtime.gpu.slots import Bounds


class HostBuffers:
    """Host memory of a step under way; a message is written while the step before still runs."""

    def __init__(self) -> None:
        none = torch.zeros(0, dtype=torch.int32)
        self.message = self.result = self.drafts = self.masks = none


@dataclass
class Pending:
    """A step whose verdict follows a grammar is not `decided` while the one before it runs: what
    may follow is known after that."""

    plan: StepPlan
    asks: Asks
    bounds: Bounds
    buffers: HostBuffers
    started: Mark
    drafts: tuple[Mark, Mark] | None  # before and behind them, where anybody drafts
    decided: bool = False
    done: Mark = field(default_factory=Mark)
    logprobs: tuple[Any, ...] = ()  # what `LogprobsReader.queue` gave
    dead_ends: dict[int, int] = field(default_factory=dict)  # see `Masks`

    @property
    def durations_s(self) -> tuple[float, float]:
        """Of drafting, and of all else: what the host prepares is part of every step, as far as
        the device waited for it."""
        draft_s = 0.0
        if self.drafts is not None:
            begun, drafted = self.drafts
            draft_s = drafted.seconds_since(begun)
        return draft_s, self.done.seconds_since(self.started) - draft_s
