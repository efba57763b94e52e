"""What goes wrong with a call, and what it is to a client: a status, and a body of one shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from litestar import Request
from litestar import Response as HttpResponse
from litestar.exceptions import HTTPException, MethodNotAllowedException

from cbatch.core.request.errors import FieldError, RefusedError
from cbatch.server.protocol.errors import (
    BodyTimeoutError,
    GenerationError,
    ServiceError,
    UnanswerableError,
    UnknownModelError,
)

AnyRequest = Request[Any, Any, Any]
Answer = HttpResponse[dict[str, Any]]
Handler = Callable[[AnyRequest, Any], Answer]
_logger = logging.getLogger("cbatch")


class ClientGoneError(RuntimeError):
    """The client closed the connection before its answer was ready."""


class BodyTooLongError(FieldError):
    """A call of more bytes than are read."""


class MediaTypeError(FieldError):
    """A body that does not call itself JSON. A page of another site can send such without asking
    the browser's leave, so they are not guessed at."""


def error_body(
    message: str, kind: str, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """As OpenAI's clients read it. `field` is the name of the one at fault."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def handlers(reject: Callable[[str], None]) -> dict[int | type[Exception], Handler]:
    """By error, for an application. `reject` counts calls that were refused, by why; the queue
    counts its own."""

    def refused(status: int, reason: str, code: str | None = None) -> Handler:
        def handle(_: AnyRequest, error: FieldError) -> Answer:
            reject(reason)
            body = error_body(str(error), "invalid_request_error", error.field, code)
            return HttpResponse(body, status_code=status)

        return handle

    return {
        FieldError: refused(400, "invalid"),
        RefusedError: refused(400, "invalid", "context_length_exceeded"),
        UnknownModelError: refused(404, "unknown_model", "model_not_found"),
        BodyTooLongError: refused(413, "body_too_long"),
        MediaTypeError: refused(415, "media_type"),
        ServiceError: _of_service,
        BodyTimeoutError: _of_slow_body,
        GenerationError: lambda _, error: _failed(error, 500),
        UnanswerableError: _unanswerable,
        ClientGoneError: lambda _, error: _failed(error, 499),
        RecursionError: _too_deep,
        HTTPException: _of_http,
        Exception: lambda request, error: HttpResponse(
            unforeseen(error, request.url.path), status_code=500
        ),
    }


def _of_service(_: AnyRequest, error: ServiceError) -> Answer:
    after_s = error.retry_after_s
    headers = {} if after_s is None else {"retry-after": str(after_s)}
    body = error_body(str(error), error.kind)
    return HttpResponse(body, status_code=error.status, headers=headers)


def _of_slow_body(request: AnyRequest, error: BodyTimeoutError) -> Answer:
    """What is still to come of it is waited for no longer."""
    answer = _of_service(request, error)
    answer.headers["connection"] = "close"
    return answer


def _failed(error: Exception, status: int) -> Answer:
    return HttpResponse(error_body(str(error), "server_error"), status_code=status)


def _unanswerable(_: AnyRequest, error: UnanswerableError) -> Answer:
    body = error_body(str(error), "invalid_request_error", str(error).partition(":")[0])
    return HttpResponse(body, status_code=400)


def _too_deep(_: AnyRequest, error: RecursionError) -> Answer:
    message = "body: is nested too deeply; send a plain JSON object"
    return HttpResponse(error_body(message, "invalid_request_error", "body"), status_code=400)


def _of_http(request: AnyRequest, error: HTTPException) -> Answer:
    """No such path, or another method."""
    headers = dict(error.headers or {})
    if isinstance(error, MethodNotAllowedException):
        headers["allow"] = ", ".join(_methods(request))
    body = error_body(error.detail, "invalid_request_error")
    if error.status_code >= 500:
        body = unforeseen(error, request.url.path)
    return HttpResponse(body, status_code=error.status_code, headers=headers)


def _methods(request: AnyRequest) -> list[str]:
    """What the path of the call does answer to."""
    return sorted(
        method
        for route in request.app.routes
        if route.path == request.url.path
        for method in getattr(route, "methods", ())
    )


def unforeseen(error: Exception, path: str) -> dict[str, Any]:
    """Log an error of the server's own, and return a body that does not show it."""
    _logger.error("%s failed", path, exc_info=error)
    return error_body("the server failed; its log says how", "server_error")
