"""Reasons why a valid request gets no response, or only part of one."""

from __future__ import annotations

from cbatch.core.request.errors import FieldError


class ServiceError(RuntimeError):
    """An error caused by the server or its load. `status` is the HTTP status if the response has
    not begun; a stream that has begun ends with an error event. `retry_after_s` is the time until a
    retry, None if unknown."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceDownError(ServiceError):
    """The server is stopping, or its engine cannot be kept running."""

    status = 503


class OverloadedError(ServiceError):
    """The queue is full, or the request's time in the queue is over."""

    status = 503
    kind = "overloaded"


class DeadlineError(ServiceError):
    """The request's time is over. Earlier output has been sent."""

    status = 504
    kind = "timeout"


class ClientDeadlineError(DeadlineError):
    """The request's time is over, by the client's own limit."""

    status = 408


class BodyTimeoutError(ServiceError):
    """The client took too long to send its request."""

    status = 408
    kind = "timeout"


class SlowReaderError(ServiceError):
    """The client left more output unread than the server buffers."""


class GenerationError(RuntimeError):
    """A choice ended with an error."""

    kind = "server_error"


class UnanswerableError(GenerationError):
    """The constraints of the request turned out to exclude every token."""


class UnknownModelError(FieldError):
    """The request names a model that is not served."""


class EngineLostError(RuntimeError):
    """The engine cannot be kept running, and the server has ended. The message says why."""
