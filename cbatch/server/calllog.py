"""A log line for every call, once it is over."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

from litestar import Request
from litestar.types import Scope

from cbatch.core.errors import FieldError
from cbatch.logs import fields
from cbatch.server.metrics import Meter

_logger = logging.getLogger("cbatch")
MAX_PATH_CHARS = 200
_KEY = "cbatch.call"  # in the ASGI scope


class CallLog:
    """Of one call. `status` is that of the answer, as far as it has begun."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self._began_s = time.monotonic()
        self._method, self._path = str(scope["method"]), str(scope["path"])[:MAX_PATH_CHARS]  # type: ignore[typeddict-item]
        self._request_id = request_id
        self.status: int | None = None
        self.key: str | None = None
        self.meter: Meter | None = None
        self.id: str | None = None
        self.streamed: bool | None = None
        self.error: str | None = None
        cast(dict[str, Any], scope)[_KEY] = self

    def fail(self, error: BaseException) -> None:
        """Its kind, and the field at fault: a message may hold what the client sent."""
        self.error = type(error).__name__
        if isinstance(error, FieldError):
            self.error += f" {error.field}"

    def write(self) -> None:
        """Of what was posted, and of what was refused."""
        status = self.status or 499  # the client left before it was answered
        if self._method != "POST" and status < 400:
            return
        meter = self.meter
        told = {} if meter is None else meter.summary()
        error = self.error or (meter and meter.error)
        _logger.info(
            "request",
            extra=fields(
                request_id=self._request_id,
                id=self.id,
                path=self._path,
                status=status,
                key=self.key,
                stream=self.streamed,
                e2e_s=round(time.monotonic() - self._began_s, 4),
                **told,
                error=error,
            ),
        )


def call_log(request: Request[Any, Any, Any]) -> CallLog:
    """That of the gate which the request came through."""
    return cast(CallLog, cast(dict[str, Any], request.scope)[_KEY])
