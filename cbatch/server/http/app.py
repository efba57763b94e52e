"""The ASGI application: the routes of the OpenAI API, and those for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
from litestar import HttpMethod, Litestar, MediaType, Request, get, post, route
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import MediaTypeError, error_body, handlers
from cbatch.server.http.intake import BodyIntake
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.middleware import METRICS_PATH, RequestLog, RequestMiddleware, request_log
from cbatch.server.http.pages import page_routes
from cbatch.server.http.streaming import events, gather, or_disconnect, submit
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.openapi import document
from cbatch.server.protocol.requests import (
    ApiRequest,
    RequestFields,
    parse_chat,
    parse_completion,
)
from cbatch.server.serving.chat_builder import ChatBuilder
from cbatch.server.serving.live_feed import LiveFeed
from cbatch.server.serving.metrics import Metrics, RequestMetrics
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.response_builder import CompletionBuilder, encode
from cbatch.server.serving.service import EngineService

IGNORED_HEADER = "x-cbatch-ignored-fields"
DEADLINE_HEADER = "x-envoy-expected-rq-timeout-ms"  # the gateway's timeout, sent by Envoy
# Parsing a longer body could delay every stream, so a thread does it.
LONG_BODY_BYTES = 32 * 2**10
DEFAULT_LIMITS = ConnectionLimits()
LOOK = [HttpMethod.GET, HttpMethod.HEAD]
ITL_TARGET_HEADER = "x-slo-itl-ms"  # the client's target for the longest gap between tokens
Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]  # 0: no limit
T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]
AnyResponse = HttpResponse[bytes] | Stream
BuilderKind = type[CompletionBuilder] | type[ChatBuilder]
Parse = Callable[[bytes, ServedModel], ApiRequest]
MetricsPage = Callable[[], Awaitable[bytes]]  # in Prometheus' text format


def create_app(
    service: EngineService,
    model: ServedModel,
    *,
    keys: KeyRing | None = None,
    open_metrics: bool = False,
    cors_origins: Collection[str] = (),
    limits: ConnectionLimits = DEFAULT_LIMITS,
    metrics: Metrics | None = None,
    metrics_page: MetricsPage | None = None,
) -> RequestMiddleware:
    """Return an application that serves one engine as `model`. If there are `keys`, requests need
    one, and so do the metrics unless `open_metrics`. Pages of `cors_origins` may send requests. A
    replica passes its own `metrics`, and a `metrics_page` with the metrics of all replicas."""
    metrics = metrics or Metrics(model.name, service)
    keys = keys or KeyRing()
    intake = BodyIntake(limits, service.queue.overloaded)
    prompts = service.open(model)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = Litestar(
        [
            *_completion_routes(CompletionHandler(service, model, metrics, intake)),
            *_model_routes(model, intake, prompts),
            *_operator_routes(service, metrics_page or metrics.own_page, open_metrics or not keys),
            *_live_routes(LiveFeed(service, model, metrics)),
        ],
        lifespan=[lifespan],
        exception_handlers=handlers(metrics.reject),
        openapi_config=None,
        logging_config=None,  # the program that runs the server decides about logs
    )
    return RequestMiddleware(
        app, keys, metrics.reject, open_metrics=open_metrics, cors_origins=cors_origins
    )


class CompletionHandler:
    """Handles one API request, from its body to its response, whole or streamed."""

    def __init__(
        self, service: EngineService, model: ServedModel, metrics: Metrics, intake: BodyIntake
    ) -> None:
        self._service, self._model, self._metrics = service, model, metrics
        self._intake = intake

    async def __call__(self, request: AnyRequest, parse: Parse, kind: BuilderKind) -> AnyResponse:
        log = request_log(request)
        log.metrics = request_metrics = RequestMetrics(self._metrics)
        try:
            return await self._respond(request, parse, kind, request_metrics, log)
        except Exception as error:
            log.fail(error)
            raise

    async def _respond(
        self,
        request: AnyRequest,
        parse: Parse,
        kind: BuilderKind,
        request_metrics: RequestMetrics,
        log: RequestLog,
    ) -> AnyResponse:
        self._service.queue.require_room()
        api_request = await read(request, self._intake, lambda body: parse(body, self._model))
        builder = kind(api_request, self._model, request_metrics)
        log.id, log.streamed = builder.id, api_request.fields.stream
        headers = {}
        if api_request.ignored:  # the client chose these names, so they are percent-encoded
            headers[IGNORED_HEADER] = ", ".join(
                quote(name[:64]) for name in api_request.ignored[:16]
            )
        stack = AsyncExitStack()
        stack.callback(request_metrics.close)
        try:
            limit_s = deadline_s(request, api_request.fields)
            itl_target_s = _header_s(request, ITL_TARGET_HEADER)
            owner = AsyncExitStack()

            async def begin() -> AsyncIterator[bytes] | None:
                streams = await submit(
                    self._service, builder, limit_s, itl_target_s, log.key, stack
                )
                if not api_request.fields.stream:
                    await gather(streams, builder)
                    return None
                stream_events = events(streams, builder, owner)
                await anext(stream_events)
                return stream_events

            stream_events = await or_disconnect(request, begin())
            if stream_events is not None:
                owner.push_async_exit(stack.pop_all())  # closing the stream cancels its requests
                return Stream(stream_events, media_type="text/event-stream", headers=headers)
        finally:
            await stack.aclose()
        return json_response(builder.whole(), headers)


def _completion_routes(handler: CompletionHandler) -> list[HTTPRouteHandler]:
    @post("/v1/completions", status_code=200)
    async def completions(request: AnyRequest) -> AnyResponse:
        return await handler(request, parse_completion, CompletionBuilder)

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: AnyRequest) -> AnyResponse:
        return await handler(request, parse_chat, ChatBuilder)

    @post("/v1/embeddings")
    async def embeddings() -> HttpResponse[dict[str, Any]]:
        message = "embeddings are not supported yet; this server completes text"
        return HttpResponse(error_body(message, "not_implemented"), status_code=501)

    return [completions, chat_completions, embeddings]


def _model_routes(
    model: ServedModel, intake: BodyIntake, prompts: PromptReader
) -> list[HTTPRouteHandler]:
    async def in_worker(
        request: AnyRequest, task: Callable[[bytes], Awaitable[bytes]]
    ) -> HttpResponse[bytes]:
        require_json(request)
        async with intake.body(request) as body:
            return HttpResponse(await task(body), media_type=MediaType.JSON)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @get("/v1/models/{name:path}")
    async def model_card(request: AnyRequest) -> dict[str, Any]:
        model.require(str(request.path_params["name"]).removeprefix("/"))
        return model.card()

    @post("/tokenize", status_code=200)
    async def tokenize(request: AnyRequest) -> HttpResponse[bytes]:
        return await in_worker(request, prompts.tokenize)

    @post("/detokenize", status_code=200)
    async def detokenize(request: AnyRequest) -> HttpResponse[bytes]:
        return await in_worker(request, prompts.detokenize)

    @get("/openapi.json")
    async def openapi() -> HttpResponse[bytes]:
        return json_response(document(**model.sampling_defaults))

    return [models, model_card, tokenize, detokenize, openapi]


def _operator_routes(
    service: EngineService, page: MetricsPage, tells_load: bool
) -> list[HTTPRouteHandler]:
    @route("/health", http_method=LOOK)
    async def health() -> HttpResponse[dict[str, Any]]:
        state: dict[str, Any] = {"status": "ok" if service.running else "down"}
        if tells_load:
            state["requests"] = service.num_requests
        return HttpResponse(state, status_code=200 if service.running else 503)

    @route("/ready", http_method=LOOK)
    async def ready() -> HttpResponse[dict[str, Any]]:
        state: dict[str, Any] = {"status": "ready" if service.ready else "not ready"}
        if service.stats is not None and service.stats.compiling:
            state["compiling"] = service.stats.compiling
        return HttpResponse(state, status_code=200 if service.ready else 503)

    @route(METRICS_PATH, http_method=LOOK)
    async def metrics_page() -> HttpResponse[bytes]:
        return HttpResponse(await page(), headers={"content-type": CONTENT_TYPE_LATEST})

    @get("/version")
    async def version_() -> dict[str, str]:
        return {"version": version("cbatch")}

    return [health, ready, metrics_page, version_]


def _live_routes(feed: LiveFeed) -> list[HTTPRouteHandler]:
    @get("/live")
    async def live() -> Stream:
        events = feed.events()
        await anext(events)  # the feed now counts this page until the generator is closed
        return Stream(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return [live, *page_routes()]


def deadline_s(request: AnyRequest, fields: RequestFields) -> float | None:
    """Return the time limit of the client or its gateway, in seconds. Raises `FieldError`."""
    limits_s = (fields.timeout, _header_s(request, DEADLINE_HEADER))
    return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)


def _header_s(request: AnyRequest, name: str) -> float | None:
    """Return a header's milliseconds in seconds, None if it is absent or 0. Raises `FieldError`."""
    value = request.headers.get(name)
    if value is None:
        return None
    try:
        return msgspec.convert(value, Milliseconds, strict=False) / 1e3 or None
    except msgspec.ValidationError as error:
        raise FieldError(name, "is not a number of milliseconds", str(error)) from error


async def read(request: AnyRequest, intake: BodyIntake, parse: Callable[[bytes], T]) -> T:
    """Return the parsed body. Raises what `parse` and `intake` raise."""
    require_json(request)
    async with intake.body(request) as body:
        if len(body) > LONG_BODY_BYTES:
            return await asyncio.to_thread(parse, body)
        return parse(body)


def require_json(request: AnyRequest) -> None:
    """Raise `MediaTypeError` unless the body is declared to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError("content-type", f"{kind!r} is not supported", "send application/json")


def json_response(
    value: msgspec.Struct | dict[str, Any], headers: dict[str, str] | None = None
) -> HttpResponse[bytes]:
    return HttpResponse(encode(value), media_type=MediaType.JSON, headers=headers)
