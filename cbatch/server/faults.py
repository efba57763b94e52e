"""What every error is to a client: a status, and a body in the one shape that clients read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from litestar import Request
from litestar import Response as HttpResponse
from litestar.exceptions import HTTPException, MethodNotAllowedException

from cbatch.core.errors import FieldError
from cbatch.server.errors import (
    ClientGoneError,
    GenerationError,
    MediaTypeError,
    OverloadedError,
    UnknownModelError,
    error_body,
)
from cbatch.server.metrics import Metrics
from cbatch.server.service import ServiceDownError

AnyRequest = Request[Any, Any, Any]
Answer = HttpResponse[dict[str, Any]]
Handler = Callable[[AnyRequest, Any], Answer]
_logger = logging.getLogger("cbatch")


def handlers(metrics: Metrics) -> dict[int | type[Exception], Handler]:
    """By error, for an application. Those of clients count as refusals."""

    def refused(status: int, reason: str, code: str | None = None) -> Handler:
        def handle(_: AnyRequest, error: FieldError) -> Answer:
            metrics.reject(reason)
            body = error_body(str(error), "invalid_request_error", error.field, code)
            return HttpResponse(body, status_code=status)

        return handle

    def overloaded(_: AnyRequest, error: OverloadedError) -> Answer:
        metrics.reject("overloaded")
        body = error_body(str(error), "overloaded")
        return HttpResponse(body, status_code=503, headers=error.headers)

    return {
        FieldError: refused(400, "invalid"),
        UnknownModelError: refused(404, "unknown_model", "model_not_found"),
        MediaTypeError: refused(415, "media_type"),
        OverloadedError: overloaded,
        ServiceDownError: _failed(503),
        GenerationError: _failed(500),
        ClientGoneError: _failed(499),
        RecursionError: _too_deep,
        HTTPException: _of_http,
        Exception: _unforeseen,
    }


def _failed(status: int) -> Handler:
    def handle(_: AnyRequest, error: Exception) -> Answer:
        return HttpResponse(error_body(str(error), "server_error"), status_code=status)

    return handle


def _too_deep(_: AnyRequest, error: RecursionError) -> Answer:
    message = "body: is nested too deeply; send a plain JSON object"
    return HttpResponse(error_body(message, "invalid_request_error", "body"), status_code=400)


def _of_http(request: AnyRequest, error: HTTPException) -> Answer:
    """No such path, another method, a body that is too large."""
    headers = dict(error.headers or {})
    if isinstance(error, MethodNotAllowedException):
        headers["allow"] = ", ".join(_methods(request))
    body = error_body(error.detail, "invalid_request_error")
    return HttpResponse(body, status_code=error.status_code, headers=headers)


def _methods(request: AnyRequest) -> list[str]:
    """What the path of the call does answer to."""
    return sorted(
        method
        for route in request.app.routes
        if route.path == request.url.path
        for method in getattr(route, "methods", ())
    )


def _unforeseen(request: AnyRequest, error: Exception) -> Answer:
    _logger.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    body = error_body("the server failed; its log says how", "server_error")
    return HttpResponse(body, status_code=500)
