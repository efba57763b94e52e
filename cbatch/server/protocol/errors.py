"""Reasons why a valid request gets no response, or only part of one."""

from __future__ import annotations

import re
from typing import Any

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
    """The request turned out to be at fault: the engine cannot run it, or its constraints exclude
    every token. The message begins with the field."""

    kind = "invalid_request_error"


class UnknownModelError(FieldError):
    """The request names a model that is not served."""


class UnknownResponseError(FieldError):
    """The request names a stored response that is not there."""


class UnknownItemError(FieldError):
    """The request refers to a stored item that is not there."""


class EngineLostError(RuntimeError):
    """The engine cannot be kept running, and the server has ended. The message says why."""


# Anthropic's types of errors, by OpenAI's types and by status. Others are the request's, up to 499,
# or the server's.
_ANTHROPIC_TYPES: dict[str | int, str] = {
    "overloaded": "overloaded_error",
    "timeout": "timeout_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_LENGTHS = re.compile(r"This model's .* is (\d+) tokens.* resulted in (?:at least )?(\d+) tokens")


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    error, types = body["error"], _ANTHROPIC_TYPES
    kind = types.get(error["type"]) or types.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "api_error")
    message = _LENGTHS.sub(_anthropic_words, error["message"])
    return {"type": "error", "error": {"type": kind, "message": message}}


def _anthropic_words(lengths: re.Match[str]) -> str:
    return f"prompt is too long: {lengths[2]} tokens > {int(lengths[1]) - 1} maximum"
