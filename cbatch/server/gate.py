"""Before any route: who may enter, and the id by which a call is found again."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from cbatch.server.answer import encode
from cbatch.server.faults import error_body
from cbatch.server.pages import PAGE_PATHS

# For probes and scrapers, which hold no keys, and the page that asks for one.
OPEN_PATHS = ("/health", "/ready", "/metrics", *PAGE_PATHS)
REQUEST_ID = b"x-request-id"
MAX_ID_CHARS = 128


class Gate:
    """Wraps an application. With `api_keys` every path but `OPEN_PATHS` asks for one of them, as a
    bearer token; they are kept and compared as digests, in a time that tells nothing. Every answer
    carries the `X-Request-Id` of its call, or one made up for it."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        given = {name: value for name, value in scope["headers"] if name in _READ}
        header = (REQUEST_ID, _request_id(given.get(REQUEST_ID, b"")))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        if scope["path"] in OPEN_PATHS or self.admits(given.get(b"authorization", b"")):
            await self._app(scope, receive, send_with_id)
        else:
            await _refuse(send_with_id)

    def admits(self, authorization: bytes) -> bool:
        """Whether the header names one of the keys, where keys are asked for."""
        if not self._digests:
            return True
        kind, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


_READ = (REQUEST_ID, b"authorization")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(given: bytes) -> bytes:
    """The client's, if it can do no harm in a log."""
    if 0 < len(given) <= MAX_ID_CHARS and all(33 <= byte < 127 for byte in given):
        return given
    return uuid.uuid4().hex.encode()


async def _refuse(send: Any) -> None:
    message = "no valid API key; send 'Authorization: Bearer KEY'"
    body = encode(error_body(message, "invalid_request_error", code="invalid_api_key"))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
