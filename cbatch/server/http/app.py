"""The ASGI application: the routes of the APIs, and those for operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from litestar import Litestar, MediaType, delete, get, post
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from prometheus_client import CONTENT_TYPE_LATEST

from cbatch.core.request.errors import FieldError
from cbatch.server.http.errors import error_body, handlers
from cbatch.server.http.handler import (
    AnyRequest,
    AnyResponse,
    BodyIntake,
    CompletionHandler,
    Parse,
    event_stream,
    json_response,
)
from cbatch.server.http.keys import KeyRing
from cbatch.server.http.limits import ConnectionLimits
from cbatch.server.http.middleware import METRICS_PATH, RequestMiddleware, record_of
from cbatch.server.http.pages import page_routes
from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.openapi import document
from cbatch.server.protocol.requests import detokenize, tokenize
from cbatch.server.protocol.response_store import KeyResponses, ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from cbatch.server.protocol.translation import renamed
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.agent_encoders import MessagesEncoder, ResponsesEncoder
from cbatch.server.serving.live_feed import LiveFeed
from cbatch.server.serving.metrics import Metrics
from cbatch.server.serving.open_request import Deadline, ending_at
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.replies import Encoder
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
    async def in_worker(request: AnyRequest, task: Callable[..., bytes], field: str) -> AnyResponse:
        body, owner = await intake.body(request), record_of(request).memory.owner
        content = await prompts.run(partial(task, body), len(body), field, owner)
        return HttpResponse(content, media_type=MediaType.JSON)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @get("/v1/models/{name:path}")
    async def model_card(request: AnyRequest) -> dict[str, Any]:
        model.require(str(request.path_params["name"]).removeprefix("/"))
        return model.card()

    @post("/tokenize", status_code=200)
    async def tokenize_(request: AnyRequest) -> AnyResponse:
        return await in_worker(request, tokenize, "prompt")

    @post("/detokenize", status_code=200)
    async def detokenize_(request: AnyRequest) -> AnyResponse:
        return await in_worker(request, detokenize, "tokens")

    @get("/openapi.json")
    async def openapi() -> HttpResponse[bytes]:
        return json_response(document(**model.sampling_defaults))

    @post("/v1/embeddings")
    async def embeddings() -> HttpResponse[dict[str, Any]]:
        message = "embeddings are not supported yet; this server completes text"
        return HttpResponse(error_body(message, "not_implemented"), status_code=501)

    return [models, model_card, tokenize_, detokenize_, openapi, embeddings]


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


def agent_routes(
    completions: CompletionHandler, limits: Limits, prompts: PromptReader
) -> list[HTTPRouteHandler]:
    store = ResponseStore(limits.response_store_bytes, limits.response_store_age_s)

    def responses_of(request: AnyRequest) -> KeyResponses:
        return store.of(record_of(request).key)

    def parse_of(request: AnyRequest) -> Parse:
        hold = record_of(request).memory.hold
        return partial(parse_responses, responses=responses_of(request), hold=hold)

    async def count(request: AnyRequest, parse: Parse, kind: type[Encoder]) -> int:
        api_request, record = await completions.read(request, parse), record_of(request)
        (prompt,) = api_request.prompts
        deadline = Deadline.of(record.began_s, api_request.timeout_s, limits.timeout_s)
        try:
            async with ending_at(deadline):
                return len(await prompts.ids(prompt, record.memory.owner))
        except FieldError as error:
            raise renamed(error, kind.field_names) from error

    @post("/v1/responses", status_code=200)
    async def responses(request: AnyRequest) -> AnyResponse:
        return await completions.respond(request, parse_of(request), ResponsesEncoder)

    @post("/v1/responses/input_tokens", status_code=200)
    async def input_tokens(request: AnyRequest) -> dict[str, Any]:
        num_tokens = await count(request, parse_of(request), ResponsesEncoder)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    @get("/v1/responses/{response_id:str}")
    async def stored(request: AnyRequest) -> HttpResponse[bytes]:
        body = responses_of(request).body(request.path_params["response_id"])
        record_of(request).memory.hold(len(body))
        return HttpResponse(body, media_type=MediaType.JSON)

    @delete("/v1/responses/{response_id:str}", status_code=200)
    async def dropped(request: AnyRequest) -> dict[str, Any]:
        response_id = request.path_params["response_id"]
        responses_of(request).delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @post("/v1/messages", status_code=200)
    async def messages(request: AnyRequest) -> AnyResponse:
        return await completions.respond(request, parse_messages, MessagesEncoder)

    @post("/v1/messages/count_tokens", status_code=200)
    async def count_tokens(request: AnyRequest) -> dict[str, Any]:
        return {"input_tokens": await count(request, parse_count, MessagesEncoder)}

    return [responses, input_tokens, stored, dropped, messages, count_tokens]
