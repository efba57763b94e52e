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


def handlers(count_rejection: Callable[[str], None]) -> dict[int | type[Exception], Handler]:
    """Return the application's error handlers, which call `count_rejection` with the reason of each
    refusal. Rejections by the queue are not counted here."""

    def refused(status: int, reason: str, code: str | None = None) -> Handler:
        def handle(_: AnyRequest, error: FieldError) -> ErrorResponse:
            count_rejection(reason)
            body = error_body(str(error), "invalid_request_error", error.field, code)
            return HttpResponse(body, status_code=status)

        return handle

    by_error: dict[int | type[Exception], Handler] = {
        FieldError: refused(400, "invalid"),
        RefusedError: refused(400, "invalid", "context_length_exceeded"),
        UnknownModelError: refused(404, "unknown_model", "model_not_found"),
        UnknownResponseError: refused(404, "unknown_response", "previous_response_not_found"),
        UnknownItemError: refused(404, "unknown_response"),
        BodyTooLongError: refused(413, "body_too_long"),
        MediaTypeError: refused(415, "media_type"),
        ServiceError: _service_error,
        BodyTimeoutError: _slow_body,
        GenerationError: lambda _, error: _failed(error, 500),
        UnanswerableError: _unanswerable,
        ClientGoneError: lambda _, error: _failed(error, 499),
        RecursionError: _too_deep,
        HTTPException: _http_error,
        Exception: lambda request, error: HttpResponse(
            internal_error_body(error, request.url.path), status_code=500
        ),
    }
    return {kind: _in_format_of_api(handle) for kind, handle in by_error.items()}


def _in_format_of_api(handle: Handler) -> Handler:
    def handle_in_format(request: AnyRequest, error: Any) -> ErrorResponse:
        answer = handle(request, error)
        answer.content = formatted(request.url.path, answer.status_code or 500, answer.content)
        return answer

    return handle_in_format


def formatted(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return anthropic_error(status, body) if path.startswith(ANTHROPIC_PATH) else body


def _service_error(_: AnyRequest, error: ServiceError) -> ErrorResponse:
    after_s = error.retry_after_s
    headers = {} if after_s is None else {"retry-after": str(after_s)}
    body = error_body(str(error), error.kind)
    return HttpResponse(body, status_code=error.status, headers=headers)


def _slow_body(request: AnyRequest, error: BodyTimeoutError) -> ErrorResponse:
    """Handle a slow body, and close the connection, since the rest of the body is not read."""
    answer = _service_error(request, error)
    answer.headers["connection"] = "close"
    return answer


def _failed(error: Exception, status: int) -> ErrorResponse:
    return HttpResponse(error_body(str(error), "server_error"), status_code=status)


def _unanswerable(_: AnyRequest, error: UnanswerableError) -> ErrorResponse:
    return HttpResponse(stream_error_body(error), status_code=400)


def stream_error_body(error: Exception) -> dict[str, Any]:
    if isinstance(error, UnanswerableError):
        return error_body(str(error), "invalid_request_error", str(error).partition(":")[0])
    if isinstance(error, GenerationError | ServiceError):
        return error_body(str(error), error.kind)
    return internal_error_body(error, "a stream")


def _too_deep(_: AnyRequest, error: RecursionError) -> ErrorResponse:
    message = "body: is nested too deeply; send a plain JSON object"
    return HttpResponse(error_body(message, "invalid_request_error", "body"), status_code=400)


def _http_error(request: AnyRequest, error: HTTPException) -> ErrorResponse:
    """Handle an unknown path, a wrong method, and other errors of the framework."""
    headers = dict(error.headers or {})
    if isinstance(error, MethodNotAllowedException):
        headers["allow"] = ", ".join(_methods(request))
    body = error_body(error.detail, "invalid_request_error")
    if error.status_code >= 500:
        body = internal_error_body(error, request.url.path)
    return HttpResponse(body, status_code=error.status_code, headers=headers)


def _methods(request: AnyRequest) -> list[str]:
    """Return the methods that the request's path supports. HEAD is answered wherever GET is."""
    routes = [route for route in request.app.routes if route.path == request.url.path]
    methods = {method for route in routes for method in getattr(route, "methods", ())}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def internal_error_body(error: Exception, path: str) -> dict[str, Any]:
    _logger.error("%s failed", path, exc_info=error)
    return error_body("the server failed; see its log", "server_error")
