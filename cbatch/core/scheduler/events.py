"""Events of the step log: the inputs of a scheduler in their order. Replaying them in a new
scheduler reproduces every decision, because it has no other input, no clock and no randomness."""

from __future__ import annotations

from typing import Any

import msgspec

from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepResult


class Event(msgspec.Struct, frozen=True, tag=True):
    """An input. `now_s` is the time that the caller passed, in seconds of the caller's clock."""


class Configured(Event, frozen=True, tag=True, omit_defaults=True):
    """An engine started. The last three fields say how to load its models again, if known."""

    config: SchedulerConfig
    model: str | None = None
    draft: str | None = None
    options: dict[str, Any] = {}  # of the engine, see `EngineOptions`


class Added(Event, frozen=True, tag=True):
    """A request was added. If it is resumed, `output` has the tokens that it had output before."""

    request: Request
    now_s: float
    output: tuple[int, ...] = ()


class Cancelled(Event, frozen=True, tag=True):
    request_id: str
    now_s: float


class TextFinished(Event, frozen=True, tag=True):
    """A stop string was found in the text, and ended the request (`Scheduler.finish`)."""

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
