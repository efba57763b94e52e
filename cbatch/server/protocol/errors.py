"""Why a well-formed call gets no answer, or no whole one."""

from __future__ import annotations

from cbatch.core.request.errors import FieldError


class ServiceError(RuntimeError):
    """The reason lies with the server or its load. `status` is the HTTP status that says so, where
    the answer has not begun; a stream that has ends with an error event. `retry_after_s` is when to
    try again; None: nobody knows."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceDownError(ServiceError):
    """The server is stopping, or its engine cannot be kept running."""

    status = 503


class OverloadedError(ServiceError):
    """The queue is full, or the request's time in it is over."""

    status = 503
    kind = "overloaded"


class DeadlineError(ServiceError):
    """The request's time is over; what was completed by then has been sent."""

    status = 504
    kind = "timeout"


class ClientDeadlineError(DeadlineError):
    """The limit was the client's own."""

    status = 408


class BodyTimeoutError(ServiceError):
    """The client took too long to send its call."""

    status = 408
    kind = "timeout"


class SlowReaderError(ServiceError):
    """The client left more unread than the server keeps for it."""


class GenerationError(RuntimeError):
    """A choice ended with an error of its own."""

    kind = "server_error"


class UnanswerableError(GenerationError):
    """What the call asks for turned out to contradict itself."""


class UnknownModelError(FieldError):
    """Another model's name than the one that is served."""


class EngineLostError(RuntimeError):
    """The engine cannot be kept running, and the server has ended for it; says why."""
