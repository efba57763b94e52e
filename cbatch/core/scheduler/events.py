"""The inputs of a scheduler, as events. In order they are the step log: replaying them into a fresh
scheduler reproduces every decision, because it has no other input (no clock, no randomness)."""

from __future__ import annotations

import msgspec

from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepResult


class Event(msgspec.Struct, frozen=True, tag=True):
    """`now_s` is the time the caller passed in, in seconds on the caller's clock."""


class Configured(Event, frozen=True, tag=True):
    config: SchedulerConfig


class Added(Event, frozen=True, tag=True):
    """`output` are tokens that it has already: it is resumed."""

    request: Request
    now_s: float
    output: tuple[int, ...] = ()


class Cancelled(Event, frozen=True, tag=True):
    request_id: str
    now_s: float


class TextFinished(Event, frozen=True, tag=True):
    """The text side found a stop string: `Scheduler.finish`."""

    request_id: str
    keep_tokens: int
    now_s: float


class Failed(Event, frozen=True, tag=True):
    request_id: str
    message: str
    now_s: float


class Planned(Event, frozen=True, tag=True):
    now_s: float


class Committed(Event, frozen=True, tag=True):
    result: StepResult
    now_s: float


class ExecutorReset(Event, frozen=True, tag=True):
    now_s: float
