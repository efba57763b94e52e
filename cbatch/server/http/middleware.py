"""Wraps every route: API keys, request ids, CORS headers, and the log line of a finished
request."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, cast

from litestar import Request
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from cbatch.server.http.errors import error_body, formatted, internal_error_body
from cbatch.server.http.keys import ApiKey, KeyBusyError, KeyRing
from cbatch.server.http.pages import PAGE_PATHS
from cbatch.server.serving.admission_queue import CallMemory, MemoryBudget
from cbatch.server.serving.replies import encode
from cbatch.server.serving.request_record import RequestRecord, RequestTotals
from cbatch.server.serving.tracing import RequestTracer, TracedRecord

# Paths that need no key, for probes and for the page that asks for a key. They show no user data.
OPEN_PATHS = ("/health", "/ready", *PAGE_PATHS)
METRICS_PATH = "/metrics"
REQUEST_ID = b"x-request-id"
API_KEY = b"x-api-key"  # where Anthropic's clients send the key
MAX_ID_CHARS = 128
# Longer bodies of responses are sent in pieces, each after the client has read most of the last.
# What a slow client has not read then counts as memory of its call.
PIECE_BYTES = 2**16
_RECORD = "cbatch.record"  # the record's key in the ASGI scope


def record_of(request: Request[Any, Any, Any]) -> RequestRecord:
    return cast(RequestRecord, cast(dict[str, Any], request.scope)[_RECORD])


class RequestMiddleware:
    """Wraps an application. If there are keys, every path except `OPEN_PATHS` (and the metrics, if
    open) requires a key, as a bearer token or in `x-api-key`. POST requests count against the key's
    limit; `totals` counts the requests that the limit refuses. Every response has an
    `X-Request-Id`, the client's or a new one. Pages of `cors_origins` (`*`: all) may read
    responses. `tracer` exports spans of requests that generate tokens."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        totals: RequestTotals,
        memory: MemoryBudget,
        *,
        open_metrics: bool,
        cors_origins: Collection[str] = (),
        tracer: RequestTracer | None = None,
    ) -> None:
        self._app, self._keys, self._totals, self._tracer = app, keys, totals, tracer
        self._memory = memory
        self.reject = totals.reject
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in cors_origins)
        self._open_paths = (*OPEN_PATHS, METRICS_PATH) if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # of any route, as RFC 9110 requires
            scope, send = cast(HTTPScope, {**scope, "method": "GET"}), _head_only(send)
        request_headers = {name: value for name, value in scope["headers"] if name in _READ_HEADERS}
        request_id = _request_id(request_headers.get(REQUEST_ID, b""))
        args = self._totals, scope["method"], scope["path"], request_id.decode()
        tracer, headers = self._tracer, scope["headers"]
        record = RequestRecord(*args) if tracer is None else TracedRecord(tracer, headers, *args)
        cast(dict[str, Any], scope)[_RECORD] = record
        memory = record.memory = CallMemory(self._memory)
        cors_headers = self._cors_headers(request_headers.get(b"origin", b""))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id), *cors_headers]
                await send(message)
            else:
                await _send_body(send, cast(dict[str, Any], message), memory)

        try:
            if cors_headers and scope["method"] == "OPTIONS" and _REQUEST_METHOD in request_headers:
                await _answer_preflight(send_with_id, request_headers.get(_REQUEST_HEADERS, b""))
            elif scope["path"] in self._open_paths or not self._keys.accepted:
                await self._app(scope, receive, send_with_id)
            else:
                key = self._keys.find(request_headers.get(b"authorization", b""))
                if key is None and API_KEY in request_headers:
                    key = self._keys.find(b"Bearer " + request_headers[API_KEY])
                if key is not None:
                    record.key, record.key_salt = key.id, key.salt
                    memory.owner = key.id if len(self._keys.accepted) > 1 else None
                await self._serve_with_key(key, scope, receive, send_with_id)
        except Exception as error:  # not handled by the application
            record.fail(error)
            if record.status is not None:
                raise
            body = formatted(record.path, 500, internal_error_body(error, record.path))
            await _send_error(send_with_id, 500, body)
        finally:
            memory.hold(0)
            if scope["path"] not in self._open_paths:
                record.write()

    def _cors_headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers for a page of `origin`; none if it may not read responses."""
        allowed = b"*" if b"*" in self._origins else origin
        if allowed not in self._origins:
            return []
        exposed = b"retry-after, x-request-id, x-cbatch-ignored-fields"
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", exposed),
            (b"vary", b"origin"),
        ]

    async def _serve_with_key(
        self, key: ApiKey | None, scope: HTTPScope, receive: Receive, send: Send
    ) -> None:
        if key is None:
            body = formatted(scope["path"], 401, error_body(*_NO_KEY_ERROR))
            await _send_error(send, 401, body, (b"www-authenticate", b"Bearer"))
            return
        try:
            with key.count_request() if scope["method"] == "POST" else nullcontext():
                await self._app(scope, receive, send)
        except KeyBusyError as error:
            self.reject("key_limit")
            after = (b"retry-after", str(error.retry_after_s).encode())
            body = error_body(str(error), "rate_limit_error", None, "rate_limit_exceeded")
            await _send_error(send, 429, formatted(scope["path"], 429, body), after)


_REQUEST_METHOD = b"access-control-request-method"
_REQUEST_HEADERS = b"access-control-request-headers"
_KEY_HEADERS = (b"authorization", API_KEY)
_READ_HEADERS = (REQUEST_ID, *_KEY_HEADERS, b"origin", _REQUEST_METHOD, _REQUEST_HEADERS)
_NO_KEY_ERROR = (
    "no valid API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
    "invalid_request_error",
    None,
    "invalid_api_key",
)


def _request_id(client_id: bytes) -> bytes:
    """Return the client's id if it is safe in a log, otherwise a new one."""
    if 0 < len(client_id) <= MAX_ID_CHARS and all(33 <= byte < 127 for byte in client_id):
        return client_id
    return uuid.uuid4().hex.encode()


def _head_only(send: Send) -> Send:
    """Return a `send` that ends the response with its head, so that a stream ends too."""
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


async def _send_body(send: Send, message: dict[str, Any], memory: CallMemory) -> None:
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        await send(cast(Message, message))
        return
    with memory.sending(len(body)):
        for at in range(0, len(body), PIECE_BYTES):
            more = message.get("more_body", False) or at + PIECE_BYTES < len(body)
            piece = {"body": body[at : at + PIECE_BYTES], "more_body": more}
            await send(cast(Message, message | piece))


async def _answer_preflight(send: Any, fields: bytes) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", fields),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _send_error(
    send: Any, status: int, content: dict[str, Any], *more: tuple[bytes, bytes]
) -> None:
    body = encode(content)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
