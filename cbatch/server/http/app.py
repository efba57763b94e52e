"""The ASGI application: the routes of the APIs, and those for operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from litestar import Litestar, MediaType, Request, get, post
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from prometheus_client import CONTENT_TYPE_LATEST

from cbatch.server.http.agent_routes import agent_routes
from cbatch.server.http.errors import error_body, handlers
from cbatch.server.http.handler import (
    BodyIntake,
    CompletionHandler,
    event_stream,
    json_response,
)
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.middleware import METRICS_PATH, RequestMiddleware, record_of
from cbatch.server.http.pages import page_routes
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.openapi import document
from cbatch.server.serving.live_feed import LiveFeed
from cbatch.server.serving.metrics import Metrics
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.service import EngineService
from cbatch.server.serving.tracing import RequestTracer, SpanExporter

DEFAULT_LIMITS = ConnectionLimits()
MetricsPage = Callable[[], Awaitable[bytes]]  # returns the page in Prometheus' text format


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
    span_exporter: SpanExporter | None = None,
) -> RequestMiddleware:
    """Return an application that serves one engine as `model`. If there are `keys`, a request needs
    a key, also for metrics unless `open_metrics`. Pages of `cors_origins` may send requests. A
    replica passes its own `metrics`, and a `metrics_page` that covers all
    replicas. `span_exporter` gets traces."""
    metrics = metrics or Metrics(model.name, service)
    keys = keys or KeyRing()
    intake = BodyIntake(limits, service.queue.overloaded)
    prompts = service.open(model)
    tracer = None
    if span_exporter is not None:
        tracer = RequestTracer(span_exporter, model.name, service.client)
    completions = CompletionHandler(service, model, intake)
    shows_load = open_metrics or not keys.accepted

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()
        if tracer is not None:
            tracer.close()

    app = Litestar(
        [
            *completions.routes(),
            *agent_routes(completions, service.limits, prompts),
            *_model_routes(model, intake, prompts),
            *_operator_routes(service, metrics_page or metrics.own_page, shows_load),
            *_live_routes(LiveFeed(service, model, metrics)),
        ],
        lifespan=[lifespan],
        exception_handlers=handlers(metrics.reject),
        openapi_config=None,
        logging_config=None,  # the program that runs the server configures logs
    )
    return RequestMiddleware(
        app,
        keys,
        metrics,
        intake.memory,
        open_metrics=open_metrics,
        cors_origins=cors_origins,
        tracer=tracer,
    )


def _model_routes(
    model: ServedModel, intake: BodyIntake, prompts: PromptReader
) -> list[HTTPRouteHandler]:
    async def in_worker(
        request: Request[Any, Any, Any], task: Callable[[bytes, str | None], Awaitable[bytes]]
    ) -> HttpResponse[bytes]:
        content = await task(await intake.body(request), record_of(request).memory.owner)
        return HttpResponse(content, media_type=MediaType.JSON)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @get("/v1/models/{name:path}")
    async def model_card(request: Request[Any, Any, Any]) -> dict[str, Any]:
        model.require(str(request.path_params["name"]).removeprefix("/"))
        return model.card()

    @post("/tokenize", status_code=200)
    async def tokenize(request: Request[Any, Any, Any]) -> HttpResponse[bytes]:
        return await in_worker(request, prompts.tokenize)

    @post("/detokenize", status_code=200)
    async def detokenize(request: Request[Any, Any, Any]) -> HttpResponse[bytes]:
        return await in_worker(request, prompts.detokenize)

    @get("/openapi.json")
    async def openapi() -> HttpResponse[bytes]:
        return json_response(document(**model.sampling_defaults))

    @post("/v1/embeddings")
    async def embeddings() -> HttpResponse[dict[str, Any]]:
        message = "embeddings are not supported yet; this server completes text"
        return HttpResponse(error_body(message, "not_implemented"), status_code=501)

    return [models, model_card, tokenize, detokenize, openapi, embeddings]


def _operator_routes(
    service: EngineService, page: MetricsPage, shows_load: bool
) -> list[HTTPRouteHandler]:
    @get("/health")
    async def health() -> HttpResponse[dict[str, Any]]:
        state: dict[str, Any] = {"status": "ok" if service.running else "down"}
        if shows_load:
            state["requests"] = service.num_requests
        return HttpResponse(state, status_code=200 if service.running else 503)

    @get("/ready")
    async def ready() -> HttpResponse[dict[str, Any]]:
        state: dict[str, Any] = {"status": "ready" if service.ready else "not ready"}
        stats = service.client.stats
        if stats is not None and stats.compiling:
            state["compiling"] = stats.compiling
        return HttpResponse(state, status_code=200 if service.ready else 503)

    @get(METRICS_PATH)
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
        return event_stream(events)

    return [live, *page_routes()]
