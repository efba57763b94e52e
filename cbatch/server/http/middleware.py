"""Before any route: who may enter, the id by which a call is found again, and, once it is over, its
line in the log."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

from litestar import Request
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import error_body
from cbatch.server.http.keys import ApiKey, KeyBusyError, KeyRing
from cbatch.server.http.pages import PAGE_PATHS
from cbatch.server.serving.answer import encode
from cbatch.server.serving.metrics import Meter
from cbatch.system.logs import fields

# For probes, which hold no keys, and the page that asks for one. Nobody learns of others there.
OPEN_PATHS = ("/health", "/ready", *PAGE_PATHS)
METRICS_PATH = "/metrics"
REQUEST_ID = b"x-request-id"
MAX_ID_CHARS = 128
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
    """That of the middleware which the request came through."""
    return cast(CallLog, cast(dict[str, Any], request.scope)[_KEY])


class CallMiddleware:
    """Wraps an application. Where there are keys every path but `OPEN_PATHS`, and that of metrics
    if they are open, asks for one of them, as a bearer token, and what is posted counts against its
    limit; `reject` counts what that refuses. Every answer carries the `X-Request-Id` of its call,
    or one made up for it."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, reject: Callable[[str], None], *, open_metrics: bool
    ) -> None:
        self._app, self._keys, self.reject = app, keys, reject
        self._open = (*OPEN_PATHS, METRICS_PATH) if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        given = {name: value for name, value in scope["headers"] if name in _READ}
        request_id = _request_id(given.get(REQUEST_ID, b""))
        log = CallLog(scope, request_id.decode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id)]
            await send(message)

        try:
            if scope["path"] in self._open or not self._keys:
                await self._app(scope, receive, send_with_id)
            else:
                key = self._keys.find(given.get(b"authorization", b""))
                log.key = None if key is None else key.name
                await self._enter(key, scope, receive, send_with_id)
        finally:
            if scope["path"] not in self._open:
                log.write()

    async def _enter(
        self, key: ApiKey | None, scope: HTTPScope, receive: Receive, send: Send
    ) -> None:
        if key is None:
            await _refuse(send, 401, *_NO_KEY, (b"www-authenticate", b"Bearer"))
            return
        try:
            with key.one_call() if scope["method"] == "POST" else nullcontext():
                await self._app(scope, receive, send)
        except KeyBusyError as error:
            self.reject("key_limit")
            after = (b"retry-after", str(error.retry_after_s).encode())
            kind = ("rate_limit_error", "rate_limit_exceeded")
            await _refuse(send, 429, str(error), *kind, after)


_READ = (REQUEST_ID, b"authorization")
_NO_KEY = (
    "no valid API key; send 'Authorization: Bearer KEY'",
    "invalid_request_error",
    "invalid_api_key",
)


def _request_id(given: bytes) -> bytes:
    """The client's, if it can do no harm in a log."""
    if 0 < len(given) <= MAX_ID_CHARS and all(33 <= byte < 127 for byte in given):
        return given
    return uuid.uuid4().hex.encode()


async def _refuse(
    send: Any, status: int, message: str, kind: str, code: str, header: tuple[bytes, bytes]
) -> None:
    body = encode(error_body(message, kind, code=code))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        header,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
