"""What goes wrong between a client and the engine, and how the client is told."""

from __future__ import annotations

import math
from typing import Any

from cbatch.core.errors import FieldError


class GenerationError(RuntimeError):
    """A choice ended with an error of its own."""


class ClientGoneError(RuntimeError):
    """The client closed the connection before its answer was ready."""


class UnknownModelError(FieldError):
    """Another model's name than the one that is served."""


class MediaTypeError(FieldError):
    """A body that does not call itself JSON. A page of another site can send such without asking
    the browser's leave, so they are not guessed at."""


class OverloadedError(RuntimeError):
    """The queue is full. `retry_after_s` is when a place is expected."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """HTTP counts in whole seconds."""
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def error_body(
    message: str, kind: str, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """As OpenAI's clients read it. `field` is the name of the one at fault."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
