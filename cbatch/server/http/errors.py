"""Errors of requests as HTTP responses: a status, and a body in OpenAI's format."""

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
    UnknownItemError,
    UnknownModelError,
    UnknownResponseError,
    anthropic_error,
)

AnyRequest = Request[Any, Any, Any]
ErrorResponse = HttpResponse[dict[str, Any]]
Handler = Callable[[AnyRequest, Any], ErrorResponse]
_logger = logging.getLogger("cbatch")
ANTHROPIC_PATH = "/v1/messages"


class ClientGoneError(RuntimeError):
    """The client closed the connection before its response was ready."""


class BodyTooLongError(FieldError):
    """The body exceeds the size limit."""


class MediaTypeError(FieldError):
    """The headers do not declare the body as JSON. Other types are rejected, since a page
    of another site can send them without the browser's preflight request."""


def error_body(
    message: str, kind: str, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


# By type of error: the HTTP status, the reason under which it is counted, and OpenAI's code.
_REFUSALS: dict[type[FieldError], tuple[int, str, str | None]] = {
    RefusedError: (400, "invalid", "context_length_exceeded"),
    UnknownModelError: (404, "unknown_model", "model_not_found"),
    UnknownResponseError: (404, "unknown_response", "previous_response_not_found"),
    UnknownItemError: (404, "unknown_response", None),
    BodyTooLongError: (413, "body_too_long", None),
    MediaTypeError: (415, "media_type", None),
}


def handlers(count_rejection: Callable[[str], None]) -> dict[int | type[Exception], Handler]:
    """Return the application's handler of errors, which calls `count_rejection` with the reason of
    each refusal. Rejections by the queue are not counted here."""

    def handle(request: AnyRequest, error: Exception) -> ErrorResponse:
        headers: dict[str, str] = {}
        if isinstance(error, FieldError):
            status, reason, code = _REFUSALS.get(type(error), (400, "invalid", None))
            count_rejection(reason)
            body = error_body(str(error), "invalid_request_error", error.field, code)
        elif isinstance(error, ServiceError):
            status, body = error.status, error_body(str(error), error.kind)
            if error.retry_after_s is not None:
                headers["retry-after"] = str(error.retry_after_s)
            if isinstance(error, BodyTimeoutError):  # the rest of the body is not read
                headers["connection"] = "close"
        elif isinstance(error, GenerationError):
            status = 400 if isinstance(error, UnanswerableError) else 500
            body = stream_error_body(error)
        elif isinstance(error, ClientGoneError):
            status, body = 499, error_body(str(error), "server_error")
        elif isinstance(error, RecursionError):
            message = "body: is nested too deeply; send a plain JSON object"
            status, body = 400, error_body(message, "invalid_request_error", "body")
        elif isinstance(error, HTTPException) and error.status_code < 500:
            status, body = error.status_code, error_body(error.detail, "invalid_request_error")
            headers |= error.headers or {}
            if isinstance(error, MethodNotAllowedException):
                headers["allow"] = ", ".join(_methods(request))
        else:
            status, body = 500, internal_error_body(error, request.url.path)
        content = formatted(request.url.path, status, body)
        return HttpResponse(content, status_code=status, headers=headers)

    return {Exception: handle, HTTPException: handle}


def formatted(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return anthropic_error(status, body) if path.startswith(ANTHROPIC_PATH) else body


def stream_error_body(error: Exception) -> dict[str, Any]:
    if isinstance(error, UnanswerableError):
        return error_body(str(error), "invalid_request_error", str(error).partition(":")[0])
    if isinstance(error, GenerationError | ServiceError):
        return error_body(str(error), error.kind)
    return internal_error_body(error, "a stream")


def _methods(request: AnyRequest) -> list[str]:
    """Return the methods that the request's path supports. HEAD is answered wherever GET is."""
    routes = [route for route in request.app.routes if route.path == request.url.path]
    methods = {method for route in routes for method in getattr(route, "methods", ())}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def internal_error_body(error: Exception, path: str) -> dict[str, Any]:
    _logger.error("%s failed", path, exc_info=error)
    return error_body("the server failed; see its log", "server_error")
