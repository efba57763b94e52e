"""Before any route: who may enter, and the id by which a call is found again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from cbatch.server.answer import encode
from cbatch.server.calllog import CallLog
from cbatch.server.faults import error_body
from cbatch.server.keys import Key, KeyBusyError, KeyRing
from cbatch.server.pages import PAGE_PATHS

# For probes and scrapers, which hold no keys, and the page that asks for one.
OPEN_PATHS = ("/health", "/ready", "/metrics", *PAGE_PATHS)
REQUEST_ID = b"x-request-id"
MAX_ID_CHARS = 128


class Gate:
    """Wraps an application. Where there are keys every path but `OPEN_PATHS` asks for one of them,
    as a bearer token, and what is posted counts against its limit; `reject` counts what that
    refuses. Every answer carries the `X-Request-Id` of its call, or one made up for it."""

    def __init__(self, app: ASGIApp, keys: KeyRing, reject: Callable[[str], None]) -> None:
        self._app, self._keys, self._reject = app, keys, reject

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
            if scope["path"] in OPEN_PATHS or not self._keys:
                await self._app(scope, receive, send_with_id)
            else:
                key = self._keys.find(given.get(b"authorization", b""))
                log.key = None if key is None else key.name
                await self._enter(key, scope, receive, send_with_id)
        finally:
            if scope["path"] not in OPEN_PATHS:
                log.write()

    async def _enter(self, key: Key | None, scope: HTTPScope, receive: Receive, send: Send) -> None:
        if key is None:
            await _refuse(send, 401, *_NO_KEY, (b"www-authenticate", b"Bearer"))
            return
        try:
            with key.one_call() if scope["method"] == "POST" else nullcontext():
                await self._app(scope, receive, send)
        except KeyBusyError as error:
            self._reject("key_limit")
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
